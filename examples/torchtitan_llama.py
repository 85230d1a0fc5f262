"""torchtitan with snapshots in a store: its small llama. Kill it and start it again: it continues.

::

    torchrun --nproc-per-node 1 -m torchtitan.train --module examples.torchtitan_llama --config debugmodel \
        --hf_assets_path CHECKOUT/tests/assets/tokenizer --dataloader.dataset_path CHECKOUT/tests/assets/c4_test

CHECKOUT: torchtitan's sources, for the tokenizer and the texts of its tests. The store's options are options of ``--checkpoint``, too.
"""

from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

import tensorstore_ck as tsck


def debugmodel() -> Trainer.Config:
    """Torchtitan's own, but for the line of the checkpoint."""
    config = llama3_debugmodel()
    config.checkpoint = tsck.titan.SnapshotManager.Config(store="./ckpt", ref="runs/llama", interval=5, keep_latest_k=3)
    return config

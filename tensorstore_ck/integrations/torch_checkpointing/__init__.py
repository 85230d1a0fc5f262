"""torch_checkpointing's `CheckpointManager` over a store: ``tsck.CheckpointManager(store="./ckpt", ref="runs/x")``.

checkpoint_manager.py  CheckpointManager: save, load, prewarm_staging, lock and close keep their meaning
rank_items.py          which items a payload can have and must have; which parts all ranks have in common, and which are each rank's own

It does not import torch_checkpointing, whose `CheckpointManager.Config` and `ItemSpec` it accepts.
"""

from tensorstore_ck.integrations.torch_checkpointing.checkpoint_manager import CheckpointManager

__all__ = ["CheckpointManager"]

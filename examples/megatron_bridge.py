"""Megatron Bridge over a store: its own checkpoint manager, which saves with the strategy of `tsck.megatron`.

Bridge refuses a class unless its module is allowed. So the script does this before it calls `pretrain`::

    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    register_allowed_target_prefix("examples.")
    config.checkpoint.custom_manager_class = "examples.megatron_bridge.CheckpointManager"
"""

from typing import Any

from megatron.bridge.training.checkpointing import DefaultCheckpointManager

import tensorstore_ck as tsck

STORE, REF = "s3://bucket/ckpt", "runs/gpt"


class CheckpointManager(DefaultCheckpointManager):  # type: ignore[misc]
    """Bridge makes one."""

    def __init__(self, checkpoint_config: Any) -> None:
        super().__init__(checkpoint_config)
        self.registered = tsck.megatron.register(STORE, ref=REF)
        self.checkpointing_context["save_strategy"] = self.registered.save

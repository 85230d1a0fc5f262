"""Megatron-core 0.16: the backend "tsck" among the strategies that its registry has."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.strategies.base import StrategyAction, register_default_strategy
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy

from tensorstore_ck.integrations.megatron.load_strategy import LoadStrategy
from tensorstore_ck.integrations.megatron.save_strategy import SaveStrategy
from tensorstore_ck.integrations.megatron.snapshot_folder import BACKEND, VERSION, end_other_checkpoint, other_backend

USED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (
        dist_checkpointing.save,
        (
            *("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "common_strategy", "validate_access_integrity"),
            *("async_sharded_save", "preprocess_common_before_consistancy_check", "content_metadata"),
        ),
    ),
    (
        dist_checkpointing.load,
        ("sharded_state_dict", "checkpoint_dir", "sharded_strategy", "common_strategy", "validate_access_integrity", "strict"),
    ),
    (CheckpointingConfig, ("sharded_backend", "sharded_backend_version", "common_backend", "common_backend_version")),
    (TorchCommonSaveStrategy.save_common, ("self", "common_state_dict", "checkpoint_dir")),
    (TorchCommonLoadStrategy.load_common, ("self", "checkpoint_dir")),
)
"""See `compatibility.USED`."""


class CommonSaveStrategy(TorchCommonSaveStrategy):  # type: ignore[misc]
    """Saves the common state as Megatron does, for any backend; but a checkpoint of another backend in the folder ends before that.

    Else a death in the middle of a save to its folder would leave its tensors together with another common state.
    """

    def save_common(self, common_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Writes ``common.pt`` on the first rank."""
        if dist.get_rank() == 0:
            end_other_checkpoint(checkpoint_dir)
        super().save_common(common_state_dict, checkpoint_dir)


class CommonLoadStrategy(TorchCommonLoadStrategy):  # type: ignore[misc]
    """Loads the common state from the snapshot; that of a folder which another strategy wrote, as Megatron does."""

    def __init__(self, sharded: LoadStrategy) -> None:
        super().__init__()
        self._sharded = sharded

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """The common state. Raises `UnpublishedError` if the folder names no snapshot that can be loaded."""
        if other_backend(checkpoint_dir):
            return super().load_common(checkpoint_dir)
        return self._sharded.open(checkpoint_dir).common()


def route_to_store(save: SaveStrategy, load: LoadStrategy) -> None:
    """Registers the strategies; a second call replaces those of the first."""
    register_default_strategy(StrategyAction.SAVE_SHARDED, BACKEND, VERSION, save)
    register_default_strategy(StrategyAction.LOAD_SHARDED, BACKEND, VERSION, load)
    register_default_strategy(StrategyAction.LOAD_COMMON, "torch", 1, CommonLoadStrategy(load))
    register_default_strategy(StrategyAction.SAVE_COMMON, "torch", 1, CommonSaveStrategy("torch", 1))

"""Megatron-core 0.17 and newer, which has no registry: its own functions go to the store for a folder that names a snapshot.

`dist_checkpointing.load`, Megatron-LM and Bridge make a `TorchDistLoadShardedStrategy` themselves, whatever ``metadata.json`` says, and
functions of `serialization` load and save the common state. So these are replaced, once in a process. Saves take `Strategies.save`.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Final

import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy, TorchDistSaveShardedStrategy, get_async_strategy
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

from tensorstore_ck.integrations.megatron.load_strategy import LoadStrategy
from tensorstore_ck.integrations.megatron.save_strategy import SaveStrategy
from tensorstore_ck.integrations.megatron.snapshot_folder import BACKEND, VERSION, end_other_checkpoint, has_dcp_metadata, is_of_store
from tensorstore_ck.integrations.megatron.version import keeps_common_state_as_object

_COMMON_CALLS: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    ((serialization._legacy_common_state_exists, ("checkpoint_dir",)),)
    if keeps_common_state_as_object()
    else ((serialization.save_common, ("common_state_dict", "checkpoint_dir")),)
)
USED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (TorchDistLoadShardedStrategy.load, ("self", "sharded_state_dict", "checkpoint_dir", "async_strategy")),
    (TorchDistLoadShardedStrategy.load_tensors_metadata, ("self", "checkpoint_dir", "metadata")),
    (TorchDistLoadShardedStrategy.load_sharded_metadata, ("self", "checkpoint_dir")),
    (TorchDistSaveShardedStrategy.async_save, ("self", "sharded_state_dict", "checkpoint_dir", "async_strategy")),
    (get_async_strategy, ("async_strategy", "module")),
    (serialization.load_common, ("checkpoint_dir",)),
    (serialization.save_config, ("config", "checkpoint_dir")),
    *_COMMON_CALLS,
)
"""See `compatibility.USED`."""
_STRATEGY: Final = "tensorstore_ck_strategy"
"""The attribute of Megatron's class that has the strategy of this process, as 0.16 has a registry."""


def route_to_store(_: SaveStrategy, load: LoadStrategy) -> None:
    """Redirects the calls; a second call replaces the first one's store."""
    native: Any = TorchDistLoadShardedStrategy
    is_redirected = _STRATEGY in vars(native)
    setattr(native, _STRATEGY, load)
    if is_redirected:
        return

    def strategy() -> LoadStrategy:
        return vars(native)[_STRATEGY]  # type: ignore[no-any-return]

    def load_all(given: dict[str, Any]) -> Any:
        force_all_tensors_to_non_fp8(given["sharded_state_dict"])  # since 0.19 Megatron leaves it to its own strategy
        return strategy().load(given["sharded_state_dict"], given["checkpoint_dir"])

    _redirect(native, "load", is_of_store, load_all)
    _redirect(native, "load_tensors_metadata", is_of_store, lambda given: strategy().load_tensors_metadata(given["checkpoint_dir"]))
    _redirect(native, "load_sharded_metadata", is_of_store, lambda given: strategy().load_sharded_metadata(given["checkpoint_dir"]))
    _redirect(serialization, "load_common", is_of_store, lambda given: strategy().open(given["checkpoint_dir"]).common())
    if keeps_common_state_as_object():  # where there is a file of it, `load_common` is called
        _redirect(serialization, "_legacy_common_state_exists", is_of_store, lambda _: True)
    else:
        serialization.save_common = _after_other_checkpoint(serialization.save_common)
    _redirect(serialization, "save_config", lambda folder: SaveStrategy.take_named(folder) and not has_dcp_metadata(folder), _save_config)


def _save_config(given: dict[str, Any]) -> None:
    """Megatron's wrapper for saves has the name of Megatron's own backend, even if it wraps another one."""
    save_config(CheckpointingConfig(BACKEND, VERSION), given["checkpoint_dir"])


def _redirect(owner: Any, name: str, where: Callable[[Any], bool], to_store: Callable[[dict[str, Any]], Any]) -> None:
    """Replaces a function of `checkpoint_dir`, for some folders, by one of its arguments."""
    stock = getattr(owner, name)
    signature = inspect.signature(stock)

    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return to_store(given) if where(given["checkpoint_dir"]) else stock(*args, **kwargs)

    setattr(owner, name, call)


def _after_other_checkpoint(save_common: Callable[..., None]) -> Callable[..., None]:
    """Else a death in the middle of a save to its folder would leave its tensors together with another common state."""

    @wraps(save_common)
    def call(common_state_dict: Any, checkpoint_dir: Any) -> None:
        if dist.get_rank() == 0:
            end_other_checkpoint(checkpoint_dir)
        save_common(common_state_dict, checkpoint_dir)

    return call

"""Megatron-core 0.17 and newer, without a registry: its own loads go to the store for a folder that names a snapshot.

`dist_checkpointing.load`, Megatron-LM and Bridge make a `TorchDistLoadShardedStrategy` themselves, whatever ``metadata.json`` says, and
functions of `serialization` load the common state. So these methods and functions are replaced. Saves take a strategy: `Strategies.save`.
"""

import inspect
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Final

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies.torch import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
    get_async_strategy,
)
from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

from tensorstore_ck.integrations.megatron.load_strategy import LoadStrategy
from tensorstore_ck.integrations.megatron.save_strategy import SaveStrategy
from tensorstore_ck.integrations.megatron.snapshot_folder import is_of_store
from tensorstore_ck.integrations.megatron.version import keeps_common_state_as_object

USED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (TorchDistLoadShardedStrategy.load, ("self", "sharded_state_dict", "checkpoint_dir", "async_strategy")),
    (TorchDistLoadShardedStrategy.load_tensors_metadata, ("self", "checkpoint_dir", "metadata")),
    (TorchDistLoadShardedStrategy.load_sharded_metadata, ("self", "checkpoint_dir")),
    (TorchDistSaveShardedStrategy.async_save, ("self", "sharded_state_dict", "checkpoint_dir", "async_strategy")),
    (get_async_strategy, ("async_strategy", "module")),
    (serialization.load_common, ("checkpoint_dir",)),
)
"""See `compatibility.USED`."""
_LOOKS_FOR_COMMON_FILE: Final = "_legacy_common_state_exists"
"""Of 0.19, where the common state of `torch_dist` is a sharded object unless there is a file, which `load_common` loads."""


def route_to_store(_: SaveStrategy, load: LoadStrategy) -> None:
    """Redirects the loads; a second call replaces the first one's store."""
    redirect = partial(_redirect, TorchDistLoadShardedStrategy)
    redirect("load", partial(_load, load))
    redirect("load_tensors_metadata", lambda given: load.load_tensors_metadata(given["checkpoint_dir"]))
    redirect("load_sharded_metadata", lambda given: load.load_sharded_metadata(given["checkpoint_dir"]))
    _redirect(serialization, "load_common", lambda given: load.open(given["checkpoint_dir"]).common())
    if keeps_common_state_as_object():
        _redirect(serialization, _LOOKS_FOR_COMMON_FILE, lambda given: True)


def _load(strategy: LoadStrategy, given: dict[str, Any]) -> Any:
    force_all_tensors_to_non_fp8(given["sharded_state_dict"])  # since 0.19 Megatron leaves it to its own strategy
    return strategy.load(given["sharded_state_dict"], given["checkpoint_dir"])


def _redirect(owner: Any, name: str, to_store: Callable[[dict[str, Any]], Any]) -> None:
    """Replaces a function of `checkpoint_dir`, for folders of the store, by one of its arguments."""
    found = getattr(owner, name)
    stock = getattr(found, "stock", found)
    signature = inspect.signature(stock)

    @wraps(stock)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        return to_store(given) if is_of_store(given["checkpoint_dir"]) else stock(*args, **kwargs)

    call.stock = stock  # type: ignore[attr-defined]
    setattr(owner, name, call)

"""The names of Megatron-core that are used in all versions, and the bases of the strategies, which differ."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

import megatron.core
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from tensorstore_ck.errors import MissingExtraError
from tensorstore_ck.integrations.megatron.version import has_registry, require_supported_version

if has_registry():
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy as SaveBase
    from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy as LoadBase
else:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy as SaveBase
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    LoadBase = object

TESTED_PACKAGES: Final = "megatron-core==0.16.1 or megatron-core==0.19.2"
USED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (
        ShardedTensor,
        (
            *("key", "data", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"),
            *("prepend_axis_num", "allow_shape_mismatch", "flattened_range"),
        ),
    ),
    (ShardedObject, ("key", "data", "global_shape", "global_offset", "replica_id")),
    (
        AsyncRequest,
        ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn", "is_frozen", "call_idx"),
    ),
)
"""What is called or made here, or calls what is here -> the parameters that it must have."""


def request_class(async_strategy: str) -> Any:
    """The `AsyncRequest` of Megatron's queue, or since 0.17 of NVRx's."""
    return AsyncRequest if has_registry() else get_async_strategy(async_strategy)[1]["AsyncRequest"]


def require_supported(used: Iterable[tuple[Callable[..., Any], tuple[str, ...]]]) -> None:
    """Checks the installed Megatron-core.

    Args:
        used: As `USED`: more of it, which this version has.

    Raises:
        MissingExtraError: its version is not supported, or a name that is used has changed.
    """
    require_supported_version()
    changed = [each.__qualname__ for each, parameters in (*USED, *used) if tuple(inspect.signature(each).parameters) != parameters]
    if changed:
        raise MissingExtraError(
            f"Megatron-core {megatron.core.__version__} has another {changed[0]} than the one that is used here: install "
            f"{TESTED_PACKAGES}, with which this was tested",
            object_id=f"megatron.core.{changed[0]}",
        )


__all__ = ["LoadBase", "SaveBase", "request_class", "require_supported"]

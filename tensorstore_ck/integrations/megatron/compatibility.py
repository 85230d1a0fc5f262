"""The names of Megatron-core that are used in all versions, and the bases of the strategies, which differ."""

from collections.abc import Callable, Iterable
from typing import Any, Final

import megatron.core
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest

from tensorstore_ck.integrations.megatron.version import PACKAGE, has_registry, require_supported_version
from tensorstore_ck.integrations.trainer.versions import changed_functions

if has_registry():
    from megatron.core.dist_checkpointing.strategies.base import AsyncSaveShardedStrategy as SaveBase
    from megatron.core.dist_checkpointing.strategies.base import LoadShardedStrategy as LoadBase
else:
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy as SaveBase
    from megatron.core.dist_checkpointing.strategies.torch import get_async_strategy

    LoadBase = object

USED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (
        ShardedTensor,
        (
            *("key", "data", "dtype", "local_shape", "global_shape", "global_offset", "axis_fragmentations", "replica_id"),
            *("prepend_axis_num", "allow_shape_mismatch", "flattened_range"),
        ),
    ),
    (ShardedObject, ("key", "data", "global_shape", "global_offset", "replica_id")),
    (AsyncRequest, ("async_fn", "async_fn_args", "finalize_fns", "async_fn_kwargs", "preload_fn", "is_frozen", "call_idx")),
)
"""Functions and classes of Megatron that this package calls or overrides -> the parameters that they must have."""


def request_class(async_strategy: str) -> Any:
    """The `AsyncRequest` of Megatron's queue, or since 0.17 of NVRx's."""
    return AsyncRequest if has_registry() else get_async_strategy(async_strategy)[1]["AsyncRequest"]


def require_supported(used: Iterable[tuple[Callable[..., Any], tuple[str, ...]]]) -> None:
    """Raises `MissingExtraError` if Megatron-core's version is not supported, or a name in `USED` or `used` has changed."""
    require_supported_version()
    PACKAGE.require_unchanged(megatron.core.__version__, changed_functions((*USED, *used)), module="megatron.core")


__all__ = ["LoadBase", "SaveBase", "request_class", "require_supported"]

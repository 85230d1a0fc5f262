"""The names of Megatron-core that are replaced or used."""

import inspect
from collections.abc import Callable
from typing import Any, Final

import megatron.core
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy, TorchCommonSaveStrategy

from tensorstore_ck.errors import MissingExtraError
from tensorstore_ck.integrations.megatron.version import require_supported_version

TESTED_PACKAGE: Final = "megatron-core==0.16.1"
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


def require_supported() -> None:
    """Checks the installed Megatron-core.

    Raises:
        MissingExtraError: its version is not supported, or a name that is used has changed.
    """
    require_supported_version()
    changed = [used.__qualname__ for used, parameters in USED if tuple(inspect.signature(used).parameters) != parameters]
    if changed:
        raise MissingExtraError(
            f"Megatron-core {megatron.core.__version__} has another {changed[0]} than the one that is used here: run "
            f"`pip install '{TESTED_PACKAGE}'`, with which this was tested",
            object_id=f"megatron.core.{changed[0]}",
        )

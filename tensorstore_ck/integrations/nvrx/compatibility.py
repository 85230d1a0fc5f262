"""The versions of NVRx that are supported, and the names that are overridden or used."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any, Final

from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.base_manager import BaseCheckpointManager
from nvidia_resiliency_ext.checkpointing.local.replication.group_utils import ExchangePlan, GroupWrapper
from nvidia_resiliency_ext.checkpointing.local.replication.strategies import ReplicationStrategy

from tensorstore_ck.integrations.trainer.versions import Package, changed_functions

PACKAGE: Final = Package("NVRx", "nvidia-resiliency-ext", (0, 4), (0, 8), "nvidia-resiliency-ext>=0.4.1,<=0.7.0")
ABSTRACT: Final = frozenset({"_cleanup", "_cleanup_failed_save", "_load", "_my_ckpt_ids", "_save"})
"""What a manager must define."""
USED: Final[tuple[tuple[Callable[..., Any], tuple[str, ...]], ...]] = (
    (BaseCheckpointManager, ("session_id", "repl_strategy")),
    (BaseCheckpointManager.find_latest, ("self",)),
    (BaseCheckpointManager.load, ("self",)),
    (BaseCheckpointManager.save, ("self", "state_dict", "iteration", "is_async")),
    (BaseCheckpointManager._ckpt_id, ("self", "iteration")),
    (BaseCheckpointManager._load_fn, ("self", "ckpt_id")),
    (ReplicationStrategy.retrieve_plan, ("self", "globally_available_ids", "wanted")),
    (ExchangePlan.required_ids, ("self", "rank")),
    (GroupWrapper.all_gather_object, ("self", "my_obj")),
)
"""What is called here, or calls what is here -> the parameters that it must have."""


def require_supported() -> None:
    """Checks the installed NVRx. Raises `MissingExtraError` if its version is not supported, or a name that is used has changed."""
    installed = version("nvidia-resiliency-ext")
    PACKAGE.require_version(installed)
    changed = [*changed_functions(USED)]
    if BaseCheckpointManager.__abstractmethods__ != ABSTRACT:
        changed.append(BaseCheckpointManager.__qualname__)
    PACKAGE.require_unchanged(installed, changed)

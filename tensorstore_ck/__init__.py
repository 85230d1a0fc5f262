"""tensorstore_ck: a content-addressed snapshot store for training state."""

import importlib
from typing import TYPE_CHECKING, Final

from tensorstore_ck.errors import (
    AlreadyExistsError,
    AmbiguousAddressError,
    BackendUnavailableError,
    BrokenLogError,
    CaptureChangedError,
    ConflictError,
    CorruptObjectError,
    DamageError,
    FormatVersionError,
    FrozenChangedError,
    GcRefusedError,
    InputError,
    InvalidNameError,
    InvalidOptionError,
    InvalidUrlError,
    LogChangedError,
    MismatchError,
    MissingExtraError,
    MissingObjectError,
    NoSpaceError,
    NotAStoreError,
    NotFoundError,
    PermissionDeniedError,
    RetryableError,
    SnapshotAbortedError,
    SnapshotDroppedError,
    SnapshotExpiredError,
    SnapshotMarkedBadError,
    StoreError,
    SuspiciousSaveError,
    UndecidedError,
    UnreadableError,
    UnsafeBackendError,
    UnsupportedValueError,
    WaitTimeoutError,
)
from tensorstore_ck.events import Event
from tensorstore_ck.log import LogChangedWarning
from tensorstore_ck.readonlystore import ReadOnlyStore
from tensorstore_ck.samples import SampleCursor
from tensorstore_ck.saving import PendingSnapshot
from tensorstore_ck.seen import LAST_SEEN
from tensorstore_ck.snapshot import Snapshot, SnapshotDetails
from tensorstore_ck.store import ANY, Store
from tensorstore_ck.store import open_store as open  # noqa: A004 - `tsck.open` reads as gzip.open does
from tensorstore_ck.streams import Streams
from tensorstore_ck.tiers import Staging

if TYPE_CHECKING:
    from tensorstore_ck.cadence import (
        Checkpointer,
        Trigger,
        at_fraction,
        at_steps,
        auto,
        every_epochs,
        every_seconds,
        every_steps,
        first,
        last,
        on_improvement,
        on_metric,
        on_preemption,
    )
    from tensorstore_ck.copying import copy
    from tensorstore_ck.exporting import ExportReport, export_snapshot
    from tensorstore_ck.fsck import FsckOptions
    from tensorstore_ck.gc import GcOptions
    from tensorstore_ck.importing import import_checkpoint, import_history, inspect_checkpoint, inspect_history
    from tensorstore_ck.progressline import ProgressLine
    from tensorstore_ck.state import Box, Boxes, FlatShard, LoadReport, register_type
    from tensorstore_ck.suspicion import SuspiciousSaveWarning
    from tensorstore_ck.training import EnvironmentChangedWarning, ResumeReport, TrainingState, verify_resume

__version__ = "0.1.0"

_LATER: Final = {
    "Checkpointer": "cadence",
    "Trigger": "cadence",
    "at_fraction": "cadence",
    "at_steps": "cadence",
    "auto": "cadence",
    "every_epochs": "cadence",
    "every_seconds": "cadence",
    "every_steps": "cadence",
    "first": "cadence",
    "last": "cadence",
    "on_improvement": "cadence",
    "on_metric": "cadence",
    "on_preemption": "cadence",
    "Box": "state",
    "Boxes": "state",
    "FlatShard": "state",
    "LoadReport": "state",
    "register_type": "state",
    "GcOptions": "gc",
    "FsckOptions": "fsck",
    "copy": "copying",
    "ExportReport": "exporting",
    "export_snapshot": "exporting",
    "import_checkpoint": "importing",
    "import_history": "importing",
    "inspect_checkpoint": "importing",
    "inspect_history": "importing",
    "ProgressLine": "progressline",
    "SuspiciousSaveWarning": "suspicion",
    "EnvironmentChangedWarning": "training",
    "ResumeReport": "training",
    "TrainingState": "training",
    "verify_resume": "training",
}
"""Name -> the subpackage that it is loaded from when it is first asked for, so that a command starts fast."""


def __getattr__(name: str) -> object:
    """Loads what takes long to load when it is first asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(f"tensorstore_ck.{_LATER[name]}"), name)
    raise AttributeError(f"module 'tensorstore_ck' has no attribute {name!r}")


__all__ = [
    "ANY",
    "LAST_SEEN",
    "AlreadyExistsError",
    "AmbiguousAddressError",
    "BackendUnavailableError",
    "Box",
    "Boxes",
    "BrokenLogError",
    "CaptureChangedError",
    "Checkpointer",
    "ConflictError",
    "CorruptObjectError",
    "DamageError",
    "EnvironmentChangedWarning",
    "Event",
    "ExportReport",
    "FlatShard",
    "FormatVersionError",
    "FrozenChangedError",
    "FsckOptions",
    "GcOptions",
    "GcRefusedError",
    "InputError",
    "InvalidNameError",
    "InvalidOptionError",
    "InvalidUrlError",
    "LoadReport",
    "LogChangedError",
    "LogChangedWarning",
    "MismatchError",
    "MissingExtraError",
    "MissingObjectError",
    "NoSpaceError",
    "NotAStoreError",
    "NotFoundError",
    "PendingSnapshot",
    "PermissionDeniedError",
    "ProgressLine",
    "ReadOnlyStore",
    "ResumeReport",
    "RetryableError",
    "SampleCursor",
    "Snapshot",
    "SnapshotAbortedError",
    "SnapshotDetails",
    "SnapshotDroppedError",
    "SnapshotExpiredError",
    "SnapshotMarkedBadError",
    "Staging",
    "Store",
    "StoreError",
    "Streams",
    "SuspiciousSaveError",
    "SuspiciousSaveWarning",
    "TrainingState",
    "Trigger",
    "UndecidedError",
    "UnreadableError",
    "UnsafeBackendError",
    "UnsupportedValueError",
    "WaitTimeoutError",
    "at_fraction",
    "at_steps",
    "auto",
    "copy",
    "every_epochs",
    "every_seconds",
    "every_steps",
    "export_snapshot",
    "first",
    "import_checkpoint",
    "import_history",
    "inspect_checkpoint",
    "inspect_history",
    "last",
    "on_improvement",
    "on_metric",
    "on_preemption",
    "open",
    "register_type",
    "verify_resume",
]

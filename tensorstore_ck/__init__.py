"""tensorstore_ck: a content-addressed snapshot store for training state."""

import importlib
from typing import TYPE_CHECKING, Final

from tensorstore_ck.backend.staging import Staging
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
from tensorstore_ck.format.random_streams import Streams
from tensorstore_ck.log import LogChangedWarning
from tensorstore_ck.log.snapshot import Snapshot, SnapshotDetails
from tensorstore_ck.session.ref_fence import LAST_SEEN
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.store import ANY, ReadOnlyStore, Store
from tensorstore_ck.store import open_store as open  # noqa: A004 - `tsck.open` reads as gzip.open does

if TYPE_CHECKING:
    from tensorstore_ck.engine.write.suspicious_save import SuspiciousSaveWarning
    from tensorstore_ck.gc import GcOptions
    from tensorstore_ck.integrations.exporting import ExportReport, export_snapshot
    from tensorstore_ck.integrations.importing import import_checkpoint, import_history, inspect_checkpoint, inspect_history
    from tensorstore_ck.maintenance.copy_store import copy
    from tensorstore_ck.maintenance.fsck import FsckOptions
    from tensorstore_ck.state import Box, Boxes, FlatShard, LoadReport, register_type
    from tensorstore_ck.training import EnvironmentChangedWarning, ResumeReport, TrainingState, verify_resume
    from tensorstore_ck.training.checkpointing import (
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
    from tensorstore_ck.training.progress_line import ProgressLine
    from tensorstore_ck.training.sample_cursor import SampleCursor

__version__ = "0.1.0"

_LATER: Final = {
    "Checkpointer": "training.checkpointing",
    "Trigger": "training.checkpointing",
    "at_fraction": "training.checkpointing",
    "at_steps": "training.checkpointing",
    "auto": "training.checkpointing",
    "every_epochs": "training.checkpointing",
    "every_seconds": "training.checkpointing",
    "every_steps": "training.checkpointing",
    "first": "training.checkpointing",
    "last": "training.checkpointing",
    "on_improvement": "training.checkpointing",
    "on_metric": "training.checkpointing",
    "on_preemption": "training.checkpointing",
    "Box": "state",
    "Boxes": "state",
    "FlatShard": "state",
    "LoadReport": "state",
    "register_type": "state",
    "GcOptions": "gc",
    "FsckOptions": "maintenance.fsck",
    "copy": "maintenance.copy_store",
    "ExportReport": "integrations.exporting",
    "export_snapshot": "integrations.exporting",
    "import_checkpoint": "integrations.importing",
    "import_history": "integrations.importing",
    "inspect_checkpoint": "integrations.importing",
    "inspect_history": "integrations.importing",
    "ProgressLine": "training.progress_line",
    "SampleCursor": "training.sample_cursor",
    "SuspiciousSaveWarning": "engine.write.suspicious_save",
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

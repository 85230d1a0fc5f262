"""The public names of `tensorstore_ck`, and the module that each is loaded from when it is first used."""

import tensorstore_ck.integrations.accelerate as _accelerate
import tensorstore_ck.integrations.deepspeed as _deepspeed
import tensorstore_ck.integrations.hf as _hf
import tensorstore_ck.integrations.lightning as _lightning
import tensorstore_ck.integrations.megatron as _megatron
import tensorstore_ck.integrations.mlflow as _mlflow
import tensorstore_ck.integrations.nvrx as _nvrx
import tensorstore_ck.integrations.ray as _ray
import tensorstore_ck.integrations.titan as _titan
import tensorstore_ck.integrations.wandb as _wandb

from .backend.staging import Staging as Staging
from .common.signing_keys import SigningKey as SigningKey
from .engine.write.suspicious_save import SuspiciousSaveWarning as SuspiciousSaveWarning
from .errors import (
    AlreadyExistsError as AlreadyExistsError,
    AmbiguousAddressError as AmbiguousAddressError,
    BackendUnavailableError as BackendUnavailableError,
    BrokenLogError as BrokenLogError,
    CaptureChangedError as CaptureChangedError,
    ConflictError as ConflictError,
    CorruptObjectError as CorruptObjectError,
    DamageError as DamageError,
    FormatVersionError as FormatVersionError,
    FrozenChangedError as FrozenChangedError,
    GcRefusedError as GcRefusedError,
    InputError as InputError,
    InvalidNameError as InvalidNameError,
    InvalidOptionError as InvalidOptionError,
    InvalidUrlError as InvalidUrlError,
    LogChangedError as LogChangedError,
    MismatchError as MismatchError,
    MissingExtraError as MissingExtraError,
    MissingObjectError as MissingObjectError,
    NoSpaceError as NoSpaceError,
    NotAStoreError as NotAStoreError,
    NotFoundError as NotFoundError,
    PermissionDeniedError as PermissionDeniedError,
    QuotaExceededError as QuotaExceededError,
    RetryableError as RetryableError,
    SnapshotAbortedError as SnapshotAbortedError,
    SnapshotDroppedError as SnapshotDroppedError,
    SnapshotExpiredError as SnapshotExpiredError,
    SnapshotMarkedBadError as SnapshotMarkedBadError,
    StoreError as StoreError,
    SuspiciousSaveError as SuspiciousSaveError,
    UndecidedError as UndecidedError,
    UnreadableError as UnreadableError,
    UnsafeBackendError as UnsafeBackendError,
    UnsupportedValueError as UnsupportedValueError,
    UntrustedError as UntrustedError,
    WaitTimeoutError as WaitTimeoutError,
)
from .events import Event as Event
from .feed import Feed as Feed, FeedVersion as FeedVersion
from .format.random_streams import Streams as Streams
from .gc import GcOptions as GcOptions
from .integrations.exporting import (
    ExportReport as ExportReport,
    FollowedFolder as FollowedFolder,
    export_snapshot as export_snapshot,
)
from .integrations.importing import (
    import_checkpoint as import_checkpoint,
    import_history as import_history,
    inspect_checkpoint as inspect_checkpoint,
    inspect_history as inspect_history,
)
from .integrations.torch_checkpointing import CheckpointManager as CheckpointManager
from .log import BrokenLogWarning as BrokenLogWarning
from .log import LogChangedWarning as LogChangedWarning
from .log.quota import Quota as Quota, QuotaWarning as QuotaWarning
from .log.maintenance_outcome import RunOutcome as RunOutcome
from .log.snapshot import Snapshot as Snapshot, SnapshotDetails as SnapshotDetails
from .maintenance.copy_store import copy as copy
from .maintenance.fsck import FsckOptions as FsckOptions
from .engine.write.request import LAST_SEEN as LAST_SEEN
from .maintenance.prove import CheckedProof as CheckedProof, check_proof as check_proof
from .session.save import PendingSnapshot as PendingSnapshot
from .state import Box as Box, Boxes as Boxes, FlatShard as FlatShard, LoadReport as LoadReport, register_type as register_type
from .store import ANY as ANY, ReadOnlyStore as ReadOnlyStore, Store as Store, open as open
from .training import (
    EnvironmentChangedWarning as EnvironmentChangedWarning,
    ResumeReport as ResumeReport,
    TrainingState as TrainingState,
    verify_resume as verify_resume,
)
from .training.checkpointing import (
    Checkpointer as Checkpointer,
    Trigger as Trigger,
    at_fraction as at_fraction,
    at_steps as at_steps,
    auto as auto,
    every_epochs as every_epochs,
    every_seconds as every_seconds,
    every_steps as every_steps,
    first as first,
    last as last,
    on_improvement as on_improvement,
    on_metric as on_metric,
    on_preemption as on_preemption,
)
from .training.progress_line import ProgressLine as ProgressLine
from .training.sample_cursor import SampleCursor as SampleCursor

accelerate = _accelerate
deepspeed = _deepspeed
hf = _hf
lightning = _lightning
megatron = _megatron
mlflow = _mlflow
nvrx = _nvrx
ray = _ray
titan = _titan
wandb = _wandb
__all__: list[str]
__version__: str

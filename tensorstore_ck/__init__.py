"""tensorstore_ck: a content-addressed snapshot store for training state."""

from tensorstore_ck.errors import (
    AlreadyExistsError,
    AmbiguousAddressError,
    BackendUnavailableError,
    BrokenLogError,
    ConflictError,
    CorruptObjectError,
    DamageError,
    FormatVersionError,
    GcRefusedError,
    InputError,
    InvalidNameError,
    InvalidOptionError,
    InvalidUrlError,
    MismatchError,
    MissingExtraError,
    MissingObjectError,
    NoSpaceError,
    NotAStoreError,
    NotFoundError,
    PermissionDeniedError,
    RetryableError,
    SnapshotAbortedError,
    SnapshotExpiredError,
    SnapshotMarkedBadError,
    StoreError,
    UndecidedError,
    UnreadableError,
    UnsafeBackendError,
    UnsupportedValueError,
)
from tensorstore_ck.seen import LAST_SEEN
from tensorstore_ck.snapshot import Snapshot, SnapshotDetails
from tensorstore_ck.store import ANY, Store
from tensorstore_ck.store import open_store as open  # noqa: A004 - `tsck.open` reads as gzip.open does

__version__ = "0.1.0"

_FROM_STATE = ("LoadReport", "register_type")


def __getattr__(name: str) -> object:
    """Loads what takes long to load when it is first asked for."""
    if name in _FROM_STATE:
        from tensorstore_ck import state  # noqa: PLC0415

        return getattr(state, name)
    if name == "GcOptions":
        from tensorstore_ck.gc import GcOptions  # noqa: PLC0415

        return GcOptions
    raise AttributeError(f"module 'tensorstore_ck' has no attribute {name!r}")


__all__ = [
    "ANY",
    "LAST_SEEN",
    "AlreadyExistsError",
    "AmbiguousAddressError",
    "BackendUnavailableError",
    "BrokenLogError",
    "ConflictError",
    "CorruptObjectError",
    "DamageError",
    "FormatVersionError",
    "GcOptions",
    "GcRefusedError",
    "InputError",
    "InvalidNameError",
    "InvalidOptionError",
    "InvalidUrlError",
    "LoadReport",
    "MismatchError",
    "MissingExtraError",
    "MissingObjectError",
    "NoSpaceError",
    "NotAStoreError",
    "NotFoundError",
    "PermissionDeniedError",
    "RetryableError",
    "Snapshot",
    "SnapshotAbortedError",
    "SnapshotDetails",
    "SnapshotExpiredError",
    "SnapshotMarkedBadError",
    "Store",
    "StoreError",
    "UndecidedError",
    "UnreadableError",
    "UnsafeBackendError",
    "UnsupportedValueError",
    "open",
    "register_type",
]

"""Every error that a caller can meet: one tree, grouped by what a handler would do.

Three groups under `StoreError`: `RetryableError` (try again, perhaps after reading the store anew), `InputError`
(the caller must change something) and `DamageError` (stored data cannot be used). `kind` is stable and shows up in
``--json``; `exit_code` is the CLI's. A message says what happened, to which object, and what to do next, on one
line without control characters.

`retry` says when the same call can succeed, which the group alone does not: a `ConflictError` comes again however often one tries.

    same           now, or after a pause: nothing needs to be changed. Nothing of what failed is visible
    after_resume   after the ref was looked at: restore what is there (`Checkpointer.resume`, `Store.checkout`), and go on from that
    after_reopen   after the store was opened anew, with what it needs: credentials, the right to write, a newer build
    never          not before something else has changed: an argument, the state, the environment, or what is stored

`Store.retrying` calls again what is "same", and looks whether an undecided put happened.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from tensorstore_ck.redaction import one_line, redacted

Retry = Literal["same", "after_resume", "after_reopen", "never"]


class StoreError(Exception):
    """Base of every error raised by tensorstore_ck."""

    kind: ClassVar[str] = "store_error"
    exit_code: ClassVar[int] = 1
    retry: ClassVar[Retry] = "never"
    """When the same call can succeed: see above."""

    def __init__(self, message: str, *, object_id: str = "") -> None:
        """`object_id` names the object that is hit: a storage name, a ref, a tensor or an option."""
        super().__init__(one_line(redacted(message)))
        self.object_id = redacted(object_id)


# --- retry --------------------------------------------------------------------------------------------------------


class RetryableError(StoreError):
    """The same call may succeed later."""

    kind = "retryable"
    exit_code = 10
    retry: ClassVar[Retry] = "same"


class ConflictError(RetryableError):
    """A ref is not where the caller expected it: another process moved it."""

    kind = "conflict"
    exit_code = 11
    retry = "after_resume"


class UndecidedError(RetryableError):
    """The backend did not say whether a commit happened; the log will tell."""

    kind = "undecided"
    exit_code = 12
    retry = "after_resume"

    def __init__(self, message: str, *, object_id: str = "", txn: bytes = b"") -> None:
        """`txn` names the put in the log, where it is one."""
        super().__init__(message, object_id=object_id)
        self.txn = txn


class BackendUnavailableError(RetryableError):
    """The backend did not answer, or answered with a passing fault."""

    kind = "backend_unavailable"
    exit_code = 13


class PlaceUnavailableError(BackendUnavailableError):
    """A place to which packs were moved cannot be used, or is not there: whatever lies there is neither missing nor damaged."""

    kind = "place_unavailable"
    exit_code = 17


class SnapshotAbortedError(RetryableError):
    """A put was given up before it was published; nothing of it is visible."""

    kind = "snapshot_aborted"
    exit_code = 14


class SnapshotDroppedError(SnapshotAbortedError):
    """A put was dropped as it was asked to be: skipped or replaced when memory was used up, or cancelled."""

    kind = "snapshot_dropped"
    exit_code = 15
    retry = "never"


class WaitTimeoutError(RetryableError):
    """What was waited for has not come yet; it goes on."""

    kind = "wait_timeout"
    exit_code = 16
    retry = "never"  # a call that put and then waited would put twice


# --- ask the user -------------------------------------------------------------------------------------------------


class InputError(StoreError):
    """The caller must change an argument, an option or the environment."""

    kind = "input"
    exit_code = 20


class InvalidNameError(InputError):
    """A ref, address, glob or tensor name is malformed."""

    kind = "invalid_name"
    exit_code = 21


class InvalidOptionError(InputError):
    """An option or argument has an unusable value."""

    kind = "invalid_option"
    exit_code = 22


class InvalidUrlError(InputError):
    """A store URL cannot be understood."""

    kind = "invalid_url"
    exit_code = 23


class UnsupportedValueError(InputError):
    """The state holds a value that cannot be stored; the message has the path to it."""

    kind = "unsupported_value"
    exit_code = 24


class NotFoundError(InputError):
    """No such ref, snapshot or tensor."""

    kind = "not_found"
    exit_code = 25


class AmbiguousAddressError(InputError):
    """A root prefix fits several snapshots."""

    kind = "ambiguous_address"
    exit_code = 26


class MismatchError(InputError):
    """A snapshot does not fit what it should be restored into, or what ranks put does not fit together."""

    kind = "mismatch"
    exit_code = 27


class AlreadyExistsError(InputError):
    """A tag, branch or store is already there."""

    kind = "already_exists"
    exit_code = 28


class NotAStoreError(InputError):
    """There is no store at this URL."""

    kind = "not_a_store"
    exit_code = 30


class FormatVersionError(InputError):
    """The store, or an entry in it, needs a newer build."""

    kind = "format_version"
    exit_code = 31
    retry = "after_reopen"


class UnsafeBackendError(InputError):
    """The backend lacks a guarantee that the operation needs."""

    kind = "unsafe_backend"
    exit_code = 32


class PermissionDeniedError(InputError):
    """The backend refused access, the filesystem is read-only, or the store was opened with ``read_only=True``."""

    kind = "permission_denied"
    exit_code = 33
    retry = "after_reopen"


class NoSpaceError(InputError):
    """The backend has no space, quota or inodes left (a put to a folder says what gc can free there), or the host no memory to restore."""

    kind = "no_space"
    exit_code = 34


class MissingExtraError(InputError):
    """An optional dependency is not installed; the message names the extra."""

    kind = "missing_extra"
    exit_code = 35


class GcRefusedError(InputError):
    """gc would free more than it may, the clocks are too far apart, or the log is not what this user has seen of it."""

    kind = "gc_refused"
    exit_code = 37


class FrozenChangedError(InputError):
    """A tensor that was put as frozen has changed."""

    kind = "frozen_changed"
    exit_code = 38


class CaptureChangedError(InputError):
    """A tensor changed while a put captured it; nothing was published."""

    kind = "capture_changed"
    exit_code = 39


class SuspiciousSaveError(InputError):
    """A put with ``unchanged="error"`` whose content contradicts its step; nothing was published."""

    kind = "suspicious_save"
    exit_code = 29


class LogChangedError(InputError):
    """With ``rollback="error"``: the log went back or was forked since it was last seen, and nobody has accepted it (`tsck accept-log`)."""

    kind = "log_changed"
    exit_code = 46


class SnapshotMarkedBadError(InputError):
    """The snapshot was marked, and is not resumed from unless asked for."""

    kind = "marked_bad"
    exit_code = 36


# --- give up ------------------------------------------------------------------------------------------------------


class DamageError(StoreError):
    """Stored data cannot be used."""

    kind = "damage"
    exit_code = 40


class CorruptObjectError(DamageError):
    """An object's bytes are not what was written."""

    kind = "corrupt_object"
    exit_code = 41


class MissingObjectError(DamageError):
    """An object that others name is gone."""

    kind = "missing_object"
    exit_code = 42


class BrokenLogError(DamageError):
    """The log is damaged: an entry is missing, corrupt or off the hash chain."""

    kind = "broken_log"
    exit_code = 43


class SnapshotExpiredError(DamageError):
    """The snapshot's objects were freed."""

    kind = "snapshot_expired"
    exit_code = 44


class UnreadableError(DamageError):
    """gc cannot tell what is needed, and frees nothing."""

    kind = "unreadable"
    exit_code = 45


BY_KIND: Final[Mapping[str, type[StoreError]]] = {
    each.kind: each for each in list(globals().values()) if isinstance(each, type) and issubclass(each, StoreError)
}
"""Every class above: how one process names an error to another."""

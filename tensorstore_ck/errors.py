"""Every error that a caller can meet: one tree, grouped by what a handler would do.

Three groups under `StoreError`: `RetryableError` (neither the call nor stored data is wrong), `InputError`
(the caller must change something) and `DamageError` (stored data cannot be used). `kind` is stable and appears in
``--json``; `exit_code` is the CLI's. A message says what happened, to which object, and what to do next, on one
line without control characters.

`retry` of an error, and nothing else, says when the same call can succeed. No class does: repeating a call never resolves a
`ConflictError`, and `WaitTimeoutError` comes from a save that continues.

    same           now, or after a pause: nothing has to change. Nothing of the failed call is visible
    after_resume   after restoring what the ref has now (`Checkpointer.resume`, `Store.checkout`) and continuing from it
    after_reopen   after opening the store again with what it needs: credentials, write access, a newer build; or with nothing else,
                   where a single writer's commit is undecided
    never          not before something else has changed: an argument, the state, the environment, or the stored data

`Store.retrying` repeats calls whose error says "same", and finds out whether an undecided save happened.
"""

from collections.abc import Mapping
from typing import ClassVar, Final, Literal

from tensorstore_ck.redaction import one_line, redacted

HELP: Final = "https://github.com/tensorstore-ck/tensorstore_ck/blob/main/docs/troubleshooting.md"
"""The page with an entry for each kind."""

Retry = Literal["same", "after_resume", "after_reopen", "never"]


class StoreError(Exception):
    """Base of every error raised by tensorstore_ck."""

    kind: ClassVar[str] = "store_error"
    exit_code: ClassVar[int] = 1
    retry: Retry = "never"
    """When the same call can succeed: see above. An error may differ from its class."""

    def __init__(self, message: str, *, object_id: str = "") -> None:
        """`object_id` names the affected object: a storage name, a ref, a tensor or an option."""
        super().__init__(one_line(redacted(message)))
        self.object_id = redacted(object_id)

    @property
    def help_url(self) -> str:
        """The entry of this kind in the documentation: cause and next step."""
        return f"{HELP}#{self.kind}"


# --- retry --------------------------------------------------------------------------------------------------------


class RetryableError(StoreError):
    """Another process or the backend got in the way; `retry` of the error says whether the same call may succeed."""

    kind = "retryable"
    exit_code = 10
    retry: Retry = "same"


class ConflictError(RetryableError):
    """A ref is not where the caller expected it: another process moved it."""

    kind = "conflict"
    exit_code = 11
    retry = "after_resume"


class UndecidedError(RetryableError):
    """The backend did not say whether a commit happened; the log will show it."""

    kind = "undecided"
    exit_code = 12
    retry: Retry = "after_resume"

    def __init__(self, message: str, *, object_id: str = "", txn: bytes = b"") -> None:
        """`txn` names the save in the log, if it is one."""
        super().__init__(message, object_id=object_id)
        self.txn = txn


class BackendUnavailableError(RetryableError):
    """The backend did not answer, or reported a transient fault."""

    kind = "backend_unavailable"
    exit_code = 13


class PlaceUnavailableError(BackendUnavailableError):
    """A cold location, to which packs were moved, cannot be used or is not there: its packs are neither missing nor damaged."""

    kind = "place_unavailable"
    exit_code = 17


class SnapshotAbortedError(RetryableError):
    """A save was aborted before it was published; nothing of it is visible."""

    kind = "snapshot_aborted"
    exit_code = 14


class SnapshotDroppedError(SnapshotAbortedError):
    """A save was dropped as requested: skipped or replaced when memory was used up, or cancelled."""

    kind = "snapshot_dropped"
    exit_code = 15
    retry = "never"


class WaitTimeoutError(RetryableError):
    """The wait timed out; the operation continues."""

    kind = "wait_timeout"
    exit_code = 16
    retry = "never"  # a call that saves and then waits would save twice


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
    """A root prefix matches several snapshots."""

    kind = "ambiguous_address"
    exit_code = 26


class MismatchError(InputError):
    """A snapshot does not match the state to restore into, or the parts of several ranks do not match."""

    kind = "mismatch"
    exit_code = 27


class AlreadyExistsError(InputError):
    """A tag, branch or store of that name exists."""

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
    """The backend has no space, quota or inodes left (a save to a folder says what gc can free), or the host has no memory to restore."""

    kind = "no_space"
    exit_code = 34


class MissingExtraError(InputError):
    """An optional dependency is not installed; the message names the extra."""

    kind = "missing_extra"
    exit_code = 35


class GcRefusedError(InputError):
    """gc would free more than it may, the clocks are too far apart, or the log differs from what this user has seen."""

    kind = "gc_refused"
    exit_code = 37


class FrozenChangedError(InputError):
    """A tensor that was declared frozen has changed."""

    kind = "frozen_changed"
    exit_code = 38


class CaptureChangedError(InputError):
    """A tensor changed while a save captured it; nothing was published."""

    kind = "capture_changed"
    exit_code = 39


class SuspiciousSaveError(InputError):
    """A save with ``unchanged="error"`` whose content contradicts its step; nothing was published."""

    kind = "suspicious_save"
    exit_code = 29


class QuotaExceededError(InputError):
    """The snapshots of a branch use as much as their quota allows: saves are refused (`tsck quota`)."""

    kind = "quota_exceeded"
    exit_code = 47


class LogChangedError(InputError):
    """With ``rollback="error"``: the log went back or was forked since it was last seen, and nobody has accepted it (`tsck accept-log`)."""

    kind = "log_changed"
    exit_code = 46


class UntrustedError(InputError):
    """The user's trust file wants a ref to be signed, and it has no valid signature; or nothing says to trust the root of a proof."""

    kind = "untrusted"
    exit_code = 48


class SnapshotMarkedBadError(InputError):
    """The snapshot is marked; a resume uses it only on explicit request."""

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
    """An object that others refer to is gone."""

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
    """An object cannot be read, and may be intact: gc frees nothing, and a repair marks nothing."""

    kind = "unreadable"
    exit_code = 45


BY_KIND: Final[Mapping[str, type[StoreError]]] = {
    cls.kind: cls for cls in list(globals().values()) if isinstance(cls, type) and issubclass(cls, StoreError)
}
"""Every class above: how one process names an error to another."""

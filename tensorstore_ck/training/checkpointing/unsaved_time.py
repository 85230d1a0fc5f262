"""How long a run has been without a published snapshot, and when that is too long. One rank's view, by its own clock."""

import math
import statistics
from collections.abc import Callable
from typing import Final

from tensorstore_ck.errors import (
    CaptureChangedError,
    ConflictError,
    InputError,
    InvalidOptionError,
    NoSpaceError,
    PermissionDeniedError,
    QuotaExceededError,
    SnapshotAbortedError,
    StoreError,
    SuspiciousSaveError,
    UndecidedError,
)
from tensorstore_ck.log.snapshot import Snapshot
from tensorstore_ck.session.group.rank_messages import DIFFER
from tensorstore_ck.store import Store

LEAST_SECONDS: Final = 3600.0
INTERVALS: Final = 10
"""The default limit, in usual intervals between saves."""
_TRANSIENT: Final = (CaptureChangedError, NoSpaceError, PermissionDeniedError, QuotaExceededError, SuspiciousSaveError)
"""Errors that someone may fix while the job runs, or that concern one moment's state."""
_OF_ONE_SAVE: Final = ("step", "parent", "expect")
"""If ranks differ in one of these options, a rank polled the step flag too late, or does not know the outcome of the previous save yet."""


def will_repeat(error: BaseException) -> bool:
    """Whether later saves will fail the same way: the state, the options or the ref are rejected, or it is no `StoreError`."""
    if not isinstance(error, StoreError):
        return True
    if isinstance(error, InvalidOptionError) and error.object_id in _OF_ONE_SAVE and DIFFER in str(error):
        return False
    return isinstance(error, ConflictError) or (isinstance(error, InputError) and not isinstance(error, _TRANSIENT))


class UnsavedTime:
    """The outcome of the saves since the last published one."""

    def __init__(self, max_seconds: float | None, clock: Callable[[], float]) -> None:
        """`max_seconds`: the limit; None: the larger of an hour and 10 usual intervals.

        Raises:
            InvalidOptionError: `max_seconds` is not a positive number.
        """
        is_time = isinstance(max_seconds, int | float) and not isinstance(max_seconds, bool) and max_seconds > 0
        if max_seconds is not None and not (is_time and math.isfinite(max_seconds)):
            raise InvalidOptionError(f"max_unsaved_seconds must be a time in seconds, not {max_seconds!r}", object_id="max_unsaved_seconds")
        self._max_seconds, self._clock = max_seconds, clock
        self._intervals: list[float] = []
        self.undecided: UndecidedError | None = None
        """The error of a save that may or may not have happened."""
        self.begin()

    def begin(self) -> None:
        """The training begins or resumes."""
        self._begun = self._clock()
        self.note_published()

    def note_published(self) -> None:
        """A save was published."""
        self._since = self._clock()
        self.failure: BaseException | None = None
        """The error of the newest failed save since then."""
        self.refusal: BaseException | None = None
        """The first permanent failure since then."""

    def begin_save(self) -> None:
        """A save begins; measures the usual interval."""
        now = self._clock()
        self._intervals = [*self._intervals[1 - INTERVALS :], now - self._begun]
        self._begun = now

    def fail(self, error: BaseException) -> bool:
        """A save failed; returns whether later ones will fail the same way."""
        self.failure = error
        if isinstance(error, UndecidedError):
            self.undecided = error
        if not will_repeat(error) or (isinstance(error, ConflictError) and self.undecided is not None):
            return False  # the conflict may be with the undecided save
        self.refusal = self.refusal or error
        return True

    def resolve_undecided(self, store: Store) -> None:
        """Asks the log whether an undecided save happened; if not, it never will. Raises `UndecidedError` if it is still unknown."""
        undecided = self.undecided
        if undecided is None:
            return

        def again() -> Snapshot:
            raise undecided

        try:
            store.retrying(again, attempts=1)
        except SnapshotAbortedError:
            pass  # it did not happen
        else:
            if self.failure is undecided:
                self.note_published()
        self.undecided = None

    @property
    def seconds(self) -> float:
        """The time since the last published snapshot."""
        return self._clock() - self._since

    @property
    def max_seconds(self) -> float:
        """The limit of `seconds`."""
        usual = statistics.median(self._intervals) if self._intervals else 0.0
        return max(LEAST_SECONDS, INTERVALS * usual) if self._max_seconds is None else self._max_seconds

    @property
    def is_too_long(self) -> bool:
        """Whether `seconds` exceeds the limit."""
        return self.seconds > self.max_seconds

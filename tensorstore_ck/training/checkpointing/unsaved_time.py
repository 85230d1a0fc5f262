"""How long a run has been without a snapshot that is sound, and when it must not go on like that. One rank's view, by its own clock."""

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
"""How many usual intervals between saves a run may go on without a snapshot."""
_MAY_PASS: Final = (CaptureChangedError, NoSpaceError, PermissionDeniedError, SuspiciousSaveError)
"""What somebody may mend while the job runs, and what is so of one moment's state."""
_OF_ONE_SAVE: Final = ("step", "parent", "expect")
"""Where ranks differ in these, one did not read the board in time, or does not know yet what came of the save before."""


def will_repeat(error: BaseException) -> bool:
    """Whether each later save will fail likewise: the state, the options or the ref are refused, or this is no error of the store's."""
    if not isinstance(error, StoreError):
        return True
    if isinstance(error, InvalidOptionError) and error.object_id in _OF_ONE_SAVE and DIFFER in str(error):
        return False
    return isinstance(error, ConflictError) or (isinstance(error, InputError) and not isinstance(error, _MAY_PASS))


class UnsavedTime:
    """What came of the saves since the newest one that is sound."""

    def __init__(self, max_seconds: float | None, clock: Callable[[], float]) -> None:
        """`max_seconds`: how long there may be none; None: the larger of an hour and 10 usual intervals.

        Raises:
            InvalidOptionError: that is no time.
        """
        is_time = isinstance(max_seconds, int | float) and not isinstance(max_seconds, bool) and max_seconds > 0
        if max_seconds is not None and not (is_time and math.isfinite(max_seconds)):
            raise InvalidOptionError(f"max_unsaved_seconds must be a time in seconds, not {max_seconds!r}", object_id="max_unsaved_seconds")
        self._max_seconds, self._clock = max_seconds, clock
        self._intervals: list[float] = []
        self.undecided: UndecidedError | None = None
        """Of the save of which it is not known whether it happened."""
        self.begin()

    def begin(self) -> None:
        """The training begins, or goes on from a snapshot."""
        self._begun = self._clock()
        self.note_published()

    def note_published(self) -> None:
        """There is one: a save was published."""
        self._since = self._clock()
        self.failure: BaseException | None = None
        """What the newest save failed with; None where none did since."""
        self.refusal: BaseException | None = None
        """The first of the failures that will repeat."""

    def begin_save(self) -> None:
        """Another save begins; for what is usual."""
        now = self._clock()
        self._intervals = [*self._intervals[1 - INTERVALS :], now - self._begun]
        self._begun = now

    def fail(self, error: BaseException) -> bool:
        """A save failed: returns whether each later one will."""
        self.failure = error
        if isinstance(error, UndecidedError):
            self.undecided = error
        if not will_repeat(error) or (isinstance(error, ConflictError) and self.undecided is not None):
            return False  # such a conflict may be with the save before
        self.refusal = self.refusal or error
        return True

    def resolve_undecided(self, store: Store) -> None:
        """Asks the log about a save that may have happened: the next one goes on from it, or it never will have.

        Raises:
            UndecidedError: that is still not known.
        """
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
        """For how long there was none."""
        return self._clock() - self._since

    @property
    def max_seconds(self) -> float:
        """For how long there may be none."""
        usual = statistics.median(self._intervals) if self._intervals else 0.0
        return max(LEAST_SECONDS, INTERVALS * usual) if self._max_seconds is None else self._max_seconds

    @property
    def is_too_long(self) -> bool:
        """Whether there was none for longer than that."""
        return self.seconds > self.max_seconds

"""Slows the writes of saves in the background down while they slow the steps down. Pure, but for the rate limit that it sets."""

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.save_progress import Stage
from tensorstore_ck.session.save import PendingSnapshot

SLOWER: Final = 1.02
"""Steps are slowed down if their median is above this many times that of the steps without a save."""
STEPS: Final = 5
"""The rate changes at most once in this many steps with a save; these are compared by their median, so that one slow step means nothing."""
MIN_QUIET: Final = 10
MAX_QUIET: Final = 50
"""How many steps without a save are needed, and kept."""
DECREASE: Final = 0.7
INCREASE: Final = 1.1
END_BY: Final = 0.8
"""A save is to end after this share of the shortest of the last `INTERVALS` times between saves."""
INTERVALS: Final = 8

Saves = Sequence[tuple[PendingSnapshot, float]]
"""Saves in progress, and when each began."""


class StepPace:
    """Watches the steps of one rank.

    After each `STEPS` steps with a save the rate changes: if these steps were slower, it falls to `DECREASE` times the rate of writing;
    else it rises by `INCREASE`. It is never below what the save needs to end in time. Nothing is limited before the usual interval between
    saves is known, nor while a second save waits. A limit ends by itself if no step ends within the time of `STEPS` steps.
    """

    def __init__(self, limit: RateLimit, stage: Stage, clock: Callable[[], float]) -> None:
        """`stage`: the one whose bytes `limit` limits."""
        self._limit, self._stage, self._clock = limit, stage, clock
        self._rate = math.inf
        self._quiet: deque[float] = deque(maxlen=MAX_QUIET)
        self._busy: list[float] = []
        """The seconds of steps with a save, since the last change of the rate."""
        self._intervals: deque[float] = deque(maxlen=INTERVALS)
        self._last_save = self._began = math.nan
        """The times at which the last save began, and the step in progress."""
        self._has_save = False
        """Whether a save was in progress when the step began."""
        self._written = 0
        """The bytes that the saves in progress had written when the step began."""
        self._busy_bytes = 0

    def note_save(self, now: float) -> None:
        """A save begins: an earlier one must make way."""
        if not math.isnan(self._last_save):
            self._intervals.append(now - self._last_save)
        self._last_save = now
        self.release()

    def release(self) -> None:
        """Somebody waits for the saves in progress: nothing is limited until the next step ends."""
        self._limit.slow_to(math.inf, 0)

    def begin_step(self, saves: Saves) -> None:
        """The training begins a step: `Checkpointer.step` returns."""
        self._began, self._has_save, self._written = self._clock(), bool(saves), self._bytes_of(saves)

    def end_step(self, saves: Saves) -> None:
        """The training has ended a step: `Checkpointer.step` is called."""
        now = self._clock()
        seconds = now - self._began
        if math.isnan(seconds):
            return
        if self._has_save:
            self._busy.append(seconds)
            self._busy_bytes += max(0, self._bytes_of(saves) - self._written)
            self._adapt()
        else:
            self._quiet.append(seconds)
        self._set_limit(saves, now, seconds)

    def _adapt(self) -> None:
        if len(self._busy) < STEPS or len(self._quiet) < MIN_QUIET:
            return
        is_slower, written = median(self._busy) > SLOWER * median(self._quiet), self._busy_bytes / sum(self._busy)
        self._busy, self._busy_bytes = [], 0
        if is_slower and written:
            self._rate = DECREASE * min(self._rate, written)
        elif not is_slower:
            self._rate *= INCREASE

    def _set_limit(self, saves: Saves, now: float, seconds: float) -> None:
        """`seconds`: of the step that has just ended."""
        running = [(pending, began) for pending, began in saves if not pending.done()]
        left_seconds = running[0][1] + END_BY * min(self._intervals) - now if running and self._intervals else 0.0
        if self._rate == math.inf or left_seconds <= 0:  # also while a second save waits: then the shortest interval has passed
            self.release()
            return
        progress = running[0][0].progress()
        needed = (progress.total_bytes - progress.done_bytes) / left_seconds
        self._limit.slow_to(max(self._rate, needed), min(STEPS * max(seconds, median(self._quiet)), left_seconds))

    def _bytes_of(self, saves: Saves) -> int:
        return sum(pending.progress().stage_bytes[self._stage] for pending, _ in saves)

"""A token bucket: how many bytes per second may pass. The clock and the sleep are injected.

Its users: `backend.store_backend` for plain reads and writes, `backend.staging.upload_pass` for uploads from a staging disk, and copies.
"""

import math
import time
from collections.abc import Callable
from typing import Final

from tensorstore_ck.common.threads import ProcessLock
from tensorstore_ck.common.units import parse_rate

BURST_SECONDS: Final = 0.25
"""Unused capacity is kept this long, or for one more take of the last size; a wait notices within this time that the rate has changed."""


class RateLimit:
    """Limits all threads together. The rate in force is the lowest of three: the one given, the job's share of the store, and the pace."""

    def __init__(self, rate: float | str | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Begins with an empty bucket. `rate`: bytes per second, or text such as ``100MB``; None: no limit.

        Raises:
            InvalidOptionError: not a rate.
        """
        self._given = math.inf if rate is None else parse_rate(rate)
        self.job_rate: float | None = None
        """What the store leaves to the job, all ranks together; None: no limit."""
        self._pace = math.inf
        self._pace_ends = 0.0
        self._ranks = 1
        self._clock = clock
        self._lock = ProcessLock()
        self._as_of = clock()
        self._taken = self._passed = 0.0
        """All bytes that were taken, and how many may have passed at `_as_of`: more than `_taken` by the capacity that was not used."""
        self._last_size = 0
        self.rate = self._given
        """Bytes per second; infinite without a limit."""
        self.waits = 0
        """How often somebody waited because of it."""

    def share(self, ranks: int) -> None:
        """From now on this is one of `ranks` processes of a job, which share its rate evenly."""
        with self._lock.here:
            self._ranks = max(ranks, 1)
            self._set_rate()

    def limit_job(self, rate: float | None) -> None:
        """Limits the job, all ranks together, also to what the store leaves to it; None: to nothing else than the rate that was given."""
        with self._lock.here:
            self.job_rate = rate
            self._set_rate()

    def slow_to(self, rate: float, seconds: float) -> None:
        """Limits this process also to `rate` for so many seconds from now; `math.inf` ends such a limit."""
        with self._lock.here:
            self._pace, self._pace_ends = rate, self._clock() + seconds
            self._set_rate()

    @property
    def burst_bytes(self) -> int:
        """The most bytes that are worth taking at once."""
        return max(1, int(min(self.rate * BURST_SECONDS, 1 << 62)))

    def take(self, count: int) -> float:
        """Takes `count` bytes; returns the seconds until they may pass at the present rate."""
        return self._seconds_until(self._take(count))

    def wait(self, count: int, sleep: Callable[[float], object]) -> None:
        """Takes `count` bytes and sleeps until they may pass, a moment at a time, as the rate may change meanwhile."""
        if self.rate == math.inf:
            return
        ticket = self._take(count)
        while (seconds := self._seconds_until(ticket)) > 0:
            self.waits += 1
            sleep(min(seconds, BURST_SECONDS))

    def _take(self, count: int) -> float:
        with self._lock.here:
            self._refill()
            self._taken += count
            self._last_size = count
            return self._taken

    def _seconds_until(self, ticket: float) -> float:
        with self._lock.here:
            self._refill()
            left = ticket - self._passed
            return left / self.rate if left >= 1 else 0.0  # a part of a byte is no reason to wait

    def _set_rate(self) -> None:
        self._refill()
        self.rate = min(self._job_share(), self._pace)

    def _refill(self) -> None:
        now = self._clock()
        if self.rate == math.inf:
            self._passed = self._taken
        else:
            kept = max(self.rate * BURST_SECONDS, self._last_size)
            self._passed = min(self._passed + self.rate * (now - self._as_of), self._taken + kept)
        self._as_of = now
        if now >= self._pace_ends and self._pace < math.inf:
            self._pace = math.inf
            self.rate = self._job_share()

    def _job_share(self) -> float:
        """What this process may use of the rate that was given and of the job's."""
        return (self._given if self.job_rate is None else min(self._given, self.job_rate)) / self._ranks

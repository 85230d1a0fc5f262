"""Retries after growing delays that can be ended early. Time is injected."""

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeVar

from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.errors import BackendUnavailableError, StoreError

FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 30.0
NAP_SECONDS: Final = 0.2
"""How long it may take to notice `stop` in a pause."""

JITTER: Final = random.SystemRandom().random
"""Between 0 and 1, from the system: a save or a wait must not draw from `random`, which is part of a training job's state."""

_logger: Final = logging.getLogger("tensorstore_ck.backend")

OnRetry = Callable[[StoreError, float], object]

T = TypeVar("T")


def next_delay(
    failures: int, first_seconds: float, longest_seconds: float, *, least: float = 0.0, jitter: Callable[[], float] = JITTER
) -> float:
    """Seconds before the next try: doubles with each earlier failure, times a random share from `least` to 1."""
    return min(first_seconds * 2.0 ** min(failures, 64), longest_seconds) * (least + (1 - least) * jitter())


class AbandonedError(Exception):
    """Another thread failed: its error is the one to raise."""


@dataclass(eq=False, repr=False)
class RetryPolicy:
    """Stops retries across threads: an exception from `stop` ends this thread's work; `failed` ends the others'."""

    stop: Callable[[], object]
    on_retry: OnRetry
    """Called with the error and the seconds until the next try."""
    sleep: Callable[[float], object] = time.sleep
    jitter: Callable[[], float] = JITTER
    """Between 0 and 1."""
    failed: Flag = field(default_factory=Flag, init=False)
    """Set when a thread has failed."""

    def check(self) -> None:
        """Raises if the work has to end."""
        if self.failed.is_set():
            raise AbandonedError
        self.stop()

    def pause(self, seconds: float) -> None:
        """Waits; raises if the work has to end."""
        while True:
            self.check()
            if seconds <= 0:
                return
            nap = min(seconds, NAP_SECONDS)
            self.sleep(nap)
            seconds -= nap

    def delay(self, failures: int) -> float:
        """Seconds before the next try after `failures` earlier failures."""
        return next_delay(failures, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS, least=0.5, jitter=self.jitter)

    def call(self, request: Callable[[], T]) -> T:
        """The result of `request`. Retries after each transient fault, without limit."""
        for failures in count():
            self.check()
            try:
                return request()
            except BackendUnavailableError as exc:
                seconds = self.delay(failures)
                _logger.debug("try %d failed, the next one is in %.1f s: %s", failures + 1, seconds, exc)
                self.on_retry(exc, seconds)
            self.pause(seconds)
        raise AssertionError("not reached")

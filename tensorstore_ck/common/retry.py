"""Waiting that somebody may end: for a turn, for an answer, for a server to come back.

`stop` is asked before every request and many times in every wait; what it raises ends the work, in whichever thread met it, and `failed`
ends that of the others. Time is injected.
"""

import random
import threading
import time
from collections.abc import Callable
from itertools import count
from typing import Final, TypeVar

from tensorstore_ck.errors import BackendUnavailableError, StoreError

FIRST_WAIT_SECONDS: Final = 0.5
LONGEST_WAIT_SECONDS: Final = 30.0
NAP_SECONDS: Final = 0.2
"""How long it may take to notice `stop` in a wait."""

Stop = Callable[[], object]
OnRetry = Callable[[StoreError, float], object]

T = TypeVar("T")


class AbandonedError(Exception):
    """Another thread failed: its error is the one to raise."""


class RetryPolicy:
    """Used by several threads at once."""

    def __init__(
        self,
        stop: Stop,
        on_retry: OnRetry,
        *,
        sleep: Callable[[float], object] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`on_retry` is told of the error, and in how many seconds it is tried again. `jitter` is between 0 and 1."""
        self.failed = threading.Event()
        """Set when a thread has failed."""
        self._stop = stop
        self._on_retry = on_retry
        self._sleep = sleep
        self._jitter = jitter

    def check(self) -> None:
        """Raises if the work is to end."""
        if self.failed.is_set():
            raise AbandonedError
        self._stop()

    def pause(self, seconds: float) -> None:
        """Waits so long."""
        while True:
            self.check()
            if seconds <= 0:
                return
            nap = min(seconds, NAP_SECONDS)
            self._sleep(nap)
            seconds -= nap

    def back_off(self, attempt: int) -> float:
        """How long to wait after that many failures: twice as long each time, between half of it and all of it."""
        return min(FIRST_WAIT_SECONDS * (1 << min(attempt, 16)), LONGEST_WAIT_SECONDS) * (1 + self._jitter()) / 2

    def until_answered(self, request: Callable[[], T]) -> T:
        """What `request` returns, tried again after each passing fault, without end."""
        for attempt in count():
            self.check()
            try:
                return request()
            except BackendUnavailableError as exc:
                seconds = self.back_off(attempt)
                self._on_retry(exc, seconds)
            self.pause(seconds)
        raise AssertionError("not reached")

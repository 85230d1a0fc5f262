"""Reports that a request waits for a server, once where many threads wait for the same one."""

import threading
import time
from collections.abc import Callable
from typing import Final

from tensorstore_ck.events import Callback, Event

NOTICE_SECONDS: Final = 5.0
"""After this long without a byte or a success an event reports it, and again after twice, four times, ... as long."""


class WaitNotices:
    """The notices of one backend. Thread-safe."""

    def __init__(self, on_wait: Callback, notice_seconds: float = NOTICE_SECONDS, clock: Callable[[], float] = time.monotonic) -> None:
        """`on_wait` is called with events of the kind ``waiting``, on the thread that waits."""
        self.notice_seconds = notice_seconds
        self._on_wait = on_wait
        self._clock = clock
        self._lock = threading.Lock()
        self._noticed_at = float("-inf")

    def report(self, what: str, wait_seconds: float, *, try_number: int = 1, error: str = "") -> None:
        """Reports one wait; not if another one was reported just before."""
        with self._lock:
            now = self._clock()
            if now - self._noticed_at < self.notice_seconds:
                return
            self._noticed_at = now
        fields: dict[str, int | float | str] = {"what": what, "try_number": try_number, "wait_seconds": wait_seconds, "error": error}
        self._on_wait(Event("waiting", "", "", None, 0, time.time_ns(), fields))

"""Lets threads wait for a change. Ctrl-C at any point leaves no lock held.

Python runs signal handlers in the main thread, between two steps of Python code. `with lock:` is safe: taking and releasing a lock is C
code, and no handler runs between it and the block. `threading.Condition` and `Event` are not: their `__enter__`, `__exit__` and `wait` are
Python code around the lock, and Ctrl-C inside leaves it locked permanently, or releases it while another thread has it.

One exception: Python 3.13 (and 3.12, if a debugger raises it) handles no exception at the jump back to the head of a loop that tests a
condition: Ctrl-C there leaves the lock locked. Such a loop under a lock is in a function of its own, since an exception that leaves a call
is handled. `tests/end_to_end/test_interrupts.py` has the rule, and finds the loops.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

T = TypeVar("T")

LOOK_SECONDS: Final = 1.0
"""A waiting thread looks again after this time: Ctrl-C may have kept another thread from waking it."""


class Changes:
    """Lets threads wait for a change of what `lock` guards."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._waiting: set[SimpleQueue[None]] = set()

    @property
    def waiting(self) -> int:
        """How many threads wait."""
        return len(self._waiting)

    def wait_for(self, look: Callable[[], T], timeout_seconds: float | None = None) -> T:
        """Calls `look` under the lock until it returns a true value or the timeout ends; returns its last result.

        The caller must not hold the lock.
        """
        deadline, wake = None if timeout_seconds is None else time.monotonic() + timeout_seconds, SimpleQueue[None]()
        try:
            while True:
                self._waiting.add(wake)
                with self.lock:
                    result = look()
                left = LOOK_SECONDS if deadline is None else min(LOOK_SECONDS, deadline - time.monotonic())
                if result or left <= 0:
                    return result
                with suppress(Empty):
                    wake.get(timeout=left)
        finally:
            self._waiting.discard(wake)

    def notify_all(self) -> None:
        """Wakes all waiting threads; called after the change, with or without the lock."""
        for wake in list(self._waiting):
            wake.put(None)


class Flag:
    """Like `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._changes = Changes()

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Sets it, and wakes all waiting threads; allowed in a signal handler."""
        self._is_set = True
        self._changes.notify_all()

    def clear(self) -> None:
        """Resets it."""
        self._is_set = False

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Waits until it is set, at most `timeout_seconds`; returns whether it is set."""
        return self._changes.wait_for(self.is_set, timeout_seconds)

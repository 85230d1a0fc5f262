"""Finds out which ranks are alive. Each raises a counter in the group's store, with the name of its host; a rank that waits for another
checks that counter.

A slow rank still raises it; one that was killed, was suspended or lost its host does not. Clocks are not compared.
"""

import platform
import queue
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from tensorstore_ck.common.threads import Helper

DEAD_AFTER_SECONDS: Final = 60.0
BEAT_SECONDS: Final = 10.0
"""The longest time between two raises of a counter, and between two checks of it."""
BEATS: Final = 6
"""The number of beats that a rank misses, at least, before it is given up."""
FIRST_LOOK: Final = 0.1
"""The share of the interval before the first check: most waits end earlier, and cost no check."""
MAX_HOST_CHARS: Final = 64
UNBORN: Final = b"0"
"""The counter of a rank that has not used the group yet: it may still compute."""
_END_SECONDS: Final = 1.0


def beat_seconds(dead_after: float) -> float:
    """The times between two raises of a rank's counter, and between two checks of it by other ranks."""
    return min(BEAT_SECONDS, dead_after / BEATS)


class Heartbeat:
    """Raises a counter on its own clone of a store and its own thread, from its call until it is closed, dropped, or the process ends.

    The clone is separate since a store's client serves one call at a time, and another thread's call may hang. The thread needs the GIL for
    an instant: a process in which one C call holds it for longer than `dead_after` counts as dead. A forked child has no such thread.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._finalizer: weakref.finalize[..., Heartbeat] | None = None

    def __call__(self, name: str, seconds: float) -> None:
        """Starts to raise the counter `name`, now and every `seconds`; once only.

        If no thread can be started, others wait for this rank as for one that has not used the group yet.
        """
        ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        # A daemon: a call that hangs must not keep the process from ending.
        thread = Helper(partial(_beat, self._store, name, seconds, ends), "tsck-alive")
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            return
        self._finalizer = weakref.finalize(self, end_thread, ends, thread)

    def close(self) -> None:
        """Ends the thread; idempotent."""
        if self._finalizer is not None:
            self._finalizer()


def _beat(store: Any, name: str, seconds: float, ends: "queue.SimpleQueue[None]") -> None:
    clone: Any = None
    count, host = 0, platform.node()[:MAX_HOST_CHARS]
    while True:
        count += 1
        try:
            clone = store.clone() if clone is None else clone
            clone.set(name, f"{count} {host}".encode())
        except Exception:  # noqa: BLE001 - this rank is alive: the next beat uses a new clone
            clone = None
        try:
            ends.get(timeout=seconds)
        except queue.Empty:
            continue
        return


def end_thread(ends: "queue.SimpleQueue[Any]", thread: threading.Thread) -> None:
    """Ends a thread that a None in the queue ends; also at the end of the process, which must not interrupt a call in C++."""
    ends.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_SECONDS)


class LivenessWatch:
    """How long the counters of other ranks have not moved, while this rank waits. Not thread-safe.

    Silence counts only while this rank checks: if it was suspended itself, maybe with all others, that time does not count.
    """

    def __init__(
        self, prefix: str, *, every: float, limit: float, on_dead: Callable[[int, bytes, float], object] = lambda *_: None
    ) -> None:
        """`prefix`: of the counters' names, before the rank; `limit`: the silence after which a rank is given up.

        `on_dead` is called with each rank that is given up, its last counter and the limit; perhaps several times.
        """
        self.prefix = prefix
        self.limit = limit
        self._every, self._on_dead = every, on_dead
        self._seen: dict[int, tuple[bytes, float]] = {}
        """Rank -> its counter, and for how long that has been the same."""
        self._looked: float | None = None
        self._due: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether it is time to check."""
        if self._due is None:
            self._due = now + self._every * FIRST_LOOK
        return now >= self._due

    def silent(self, counters: Mapping[int, bytes], now: float) -> list[int]:
        """The ranks that have been silent for too long, by their counters as they are now."""
        gap = 0.0 if self._looked is None else min(now - self._looked, 2 * self._every)
        self._looked, self._due = now, now + self._every
        gone = []
        for rank, counter in counters.items():
            before, seconds = self._seen.get(rank, (UNBORN, 0.0))
            seconds = seconds + gap if counter == before != UNBORN else 0.0
            self._seen[rank] = counter, seconds
            if seconds >= self.limit:
                gone.append(rank)
                self._on_dead(rank, counter, self.limit)
            else:
                self._due = min(self._due, now + self.limit - seconds)
        return gone

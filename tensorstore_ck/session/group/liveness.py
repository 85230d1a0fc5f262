"""Who lives: each rank raises a counter in the group's store, and who waits for a rank looks whether its counter still moves.

A rank that is slow goes on to raise it; one that was killed, was suspended or lost its host does not. Clocks are not compared.
"""

import queue
import threading
import weakref
from collections.abc import Mapping
from typing import Any, Final

DEAD_AFTER_SECONDS: Final = 60.0
BEAT_SECONDS: Final = 10.0
"""At most: between two raises of a counter, and between two looks at it."""
BEATS: Final = 6
"""At least, that a rank misses before it is given up."""
FIRST_LOOK: Final = 0.1
"""Of the time between two looks: most waits are over before, and cost no look."""
UNBORN: Final = b"0"
"""The counter of a rank that has not used the group yet: it may still compute."""
_END_SECONDS: Final = 1.0


def beat_seconds(dead_after: float) -> float:
    """How often a rank says that it lives, and is looked for."""
    return min(BEAT_SECONDS, dead_after / BEATS)


class Heartbeat:
    """Raises a counter on a clone of a store, on a thread of its own, from its call until it is closed, dropped, or the process ends.

    The clone is its own, since a store's client serves one call at a time, and another thread's call may hang. What the thread needs is
    the GIL, for an instant: a process in which one C call holds it for longer than the group's patience counts as dead meanwhile.
    A forked child has no such thread, and so does not speak for its parent.
    """

    def __init__(self, store: Any) -> None:
        self._store = store
        self._finalizer: weakref.finalize[..., Heartbeat] | None = None

    def __call__(self, name: str, seconds: float) -> None:
        """Begins to raise the counter `name`, now and every so many seconds; once only.

        Where no thread is to be had, others wait for this rank as for one that has not used the group yet.
        """
        ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        # A daemon: a call that hangs must not keep the process from ending.
        thread = threading.Thread(target=_beat, args=(self._store, name, seconds, ends), name="tsck-alive", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return
        self._finalizer = weakref.finalize(self, _end, ends, thread)

    def close(self) -> None:
        """Ends the thread; idempotent."""
        if self._finalizer is not None:
            self._finalizer()


def _beat(store: Any, name: str, seconds: float, ends: "queue.SimpleQueue[None]") -> None:
    clone: Any = None
    count = 0
    while True:
        count += 1
        try:
            clone = store.clone() if clone is None else clone
            clone.set(name, str(count).encode())
        except Exception:  # noqa: BLE001 - whatever it is, this rank lives: with a new clone, next time
            clone = None
        try:
            ends.get(timeout=seconds)
        except queue.Empty:
            continue
        return


def _end(ends: "queue.SimpleQueue[None]", thread: threading.Thread) -> None:
    """Ends the thread; also when the process ends, where C++ must not be left in the middle of a call."""
    ends.put(None)
    if thread is not threading.current_thread():
        thread.join(_END_SECONDS)


class LivenessWatch:
    """What one rank sees of the counters of others while it waits for them. Not thread-safe.

    Silence counts only while this rank looks: one that was suspended itself, maybe with all others, has not heard that they were silent.
    """

    def __init__(self, prefix: str, *, every: float, limit: float) -> None:
        """`prefix`: of the counters' names, to which the rank is added; `limit`: the silence after which a rank is given up."""
        self.prefix = prefix
        self.limit = limit
        self._every = every
        self._seen: dict[int, tuple[bytes, float]] = {}
        """Rank -> its counter, and for how long that has been the same."""
        self._looked: float | None = None
        self._due: float | None = None

    def is_due(self, now: float) -> bool:
        """Whether it is time to look."""
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
            else:
                self._due = min(self._due, now + self.limit - seconds)
        return gone

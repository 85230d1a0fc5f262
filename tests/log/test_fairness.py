"""Writers that append as fast as they can get about the same number of entries, in simulated time."""

import heapq
import random
import threading
from typing import Final

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tests.effort import PATIENCE_SECONDS
from tests.log.scripted import Tricky, mark_op, open_log

CALL_SECONDS: Final = 0.001
END_SECONDS: Final = 2.0


class SimulatedTime:
    """Lets threads run one at a time: always the one whose time is the earliest."""

    def __init__(self, threads: int) -> None:
        self.now_seconds = 0.0
        self._running = threads
        self._lock = threading.Lock()
        self._waiting: list[tuple[float, int, threading.Event]] = []
        self._number = 0

    def spend(self, seconds: float) -> None:
        go = threading.Event()
        with self._lock:
            self._number += 1
            heapq.heappush(self._waiting, (self.now_seconds + seconds, self._number, go))
            self._release()
        assert go.wait(PATIENCE_SECONDS)

    def end(self) -> None:
        with self._lock:
            self._release()

    def _release(self) -> None:
        self._running -= 1
        if not self._running and self._waiting:
            self.now_seconds, _, go = heapq.heappop(self._waiting)
            self._running = 1
            go.set()


def entries_of_each(writers: int, work_seconds: float) -> list[int]:
    """How many entries each of `writers` appends; between two it works for about `work_seconds`."""
    store, time, counts = MemoryBackend(), SimulatedTime(writers), [0] * writers
    open_log(store).append(lambda _: [mark_op("first")])

    def write(number: int) -> None:
        draw = random.Random(number)
        backend = Tricky(store)
        backend.before = lambda _what, _name: time.spend(CALL_SECONDS * draw.lognormvariate(0, 0.4))
        log = open_log(backend, sleep=time.spend, jitter=draw.random, clock=lambda: int(time.now_seconds * 1e9))
        time.spend(draw.random() * work_seconds)
        while time.now_seconds < END_SECONDS:
            log.append(lambda _: [mark_op("mine")])
            counts[number] += 1
            time.spend(draw.random() * 2 * work_seconds)
        time.end()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("writers", [4, 16])
def test_no_writer_starves(writers: int) -> None:
    counts = entries_of_each(writers, work_seconds=0.004)
    jain_index = sum(counts) ** 2 / (writers * sum(count**2 for count in counts))
    assert jain_index >= 0.95, counts
    assert sum(counts) >= 0.4 * END_SECONDS / (3 * CALL_SECONDS), "a pause after a lost race is short"

"""Processes of one host that fold into one table: none empties what another has folded, wherever they meet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.log import table_rows
from tensorstore_ck.log.cache import Batch, MemoryTable
from tests.log.cache.faultytable import CacheFaults, FaultyTable
from tests.log.scripted import append_puts, follow, open_log


class Interrupted(MemoryTable):
    """Something happens before the k-th batch, and something else after each."""

    at = 0
    before: Callable[[], object] = staticmethod(lambda: None)
    after: Callable[[], object] = staticmethod(lambda: None)

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        self.at -= 1
        if self.at == 0:
            self.before()
        with super().batch(wait=wait) as batch:
            yield batch
        self.after()


@pytest.mark.parametrize("entries", [1, 70])
@pytest.mark.parametrize("at", range(1, 5))
def test_a_new_process_meets_another_one(at: int, entries: int) -> None:
    """With 70 entries there is a checkpoint to begin with."""
    backend = MemoryBackend()
    append_puts(open_log(backend), entries)
    table = Interrupted()
    one, other = open_log(backend, table), open_log(backend, table)
    seen: list[int] = []

    def meet() -> None:
        other.sync()
        table.after = lambda: seen.append(len(follow(other.view(), "runs/gpt")))
        table.after()

    table.at, table.before = at, meet
    assert one.sync().n == entries
    assert len(follow(one.view(), "runs/gpt")) == entries
    assert set(seen) <= {entries}, "what the other process saw stays"


class EmptiedOnTheWay(FaultyTable):
    """Another process empties it before the k-th batch."""

    at = 0

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        self.at -= 1
        if self.at == 0:
            with super().batch() as batch:
                batch.clear(b"")
        with super().batch(wait=wait) as batch:
            yield batch


@pytest.mark.parametrize("is_garbage", [False, True])
def test_a_disk_that_is_of_no_use_when_its_lock_is_free(is_garbage: bool, recwarn: pytest.WarningsRecorder) -> None:
    backend, faults = MemoryBackend(), CacheFaults()
    table = EmptiedOnTheWay(faults)
    log = open_log(backend, table)
    append_puts(log, 3)
    faults.reset(range(1 << 30), is_busy=True)
    append_puts(open_log(backend), 1, first=3)
    assert log.sync().n == 4
    faults.failing = range(0)
    if is_garbage:
        with table.batch() as batch:
            batch.put(table_rows.HEAD.prefix, b"\xc1")
    else:
        table.at = 2  # after the look whether the lock is free
    for n in (5, 6):
        append_puts(open_log(backend), 1, first=n)
        assert log.sync().n == n
        assert len(follow(log.view(), "runs/gpt")) == n

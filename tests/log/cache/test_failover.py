"""A table in memory replaces one on disk that fails; the owner of its contents fills it."""

import os
import warnings
from collections.abc import Callable

import pytest

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.log.block_index import BlockIndex, Location
from tensorstore_ck.log.cache import CacheWarning, FailoverTable, MemoryTable, Table
from tests.log.cache.faultytable import CacheFaults, FaultyTable

ROWS = {b"k%d" % number: b"v%d" % number for number in range(600)}


class Place:
    """A failover table, the disk's under it, and a clock."""

    def __init__(self) -> None:
        self.faults, self.now, self.fills = CacheFaults(), 0.0, 0
        self.disk = FaultyTable(self.faults)
        self.table = FailoverTable(self.disk, self.fill, clock=lambda: self.now)
        self.fill(self.disk)

    def fill(self, table: Table) -> None:
        self.fills += 1
        with table.batch() as batch:
            for key, value in ROWS.items():
                batch.put(key, value)

    def fail(self, *, is_busy: bool = False) -> None:
        self.faults.reset(range(1 << 30), is_busy=is_busy)

    def heal(self) -> None:
        self.faults.failing = range(0)


def write(table: Table) -> None:
    with table.batch() as batch:
        batch.put(b"new", b"")


def test_what_is_read_is_the_same(recwarn: pytest.WarningsRecorder) -> None:
    for reverse in (False, True):
        for at in range(4):  # three pages and one row
            place = Place()
            place.faults.reset(range(at, 1 << 30), is_busy=False)
            assert list(place.table.scan(b"k", reverse=reverse)) == sorted(ROWS.items(), reverse=reverse), at
            assert place.table.get(b"k1") == b"v1"
            assert place.fills == 2
    assert {each.category for each in recwarn} == {CacheWarning}


def test_a_batch_fails_once_and_works_then() -> None:
    place = Place()
    place.fail()
    with pytest.warns(CacheWarning, match="using memory"), pytest.raises(Exception, match="the test's fault"):
        write(place.table)
    write(place.table)
    assert place.table.get(b"new") == b""
    assert place.table.get(b"k1") == b"v1"


def test_what_failed_is_left_for_good_with_one_warning() -> None:
    place = Place()
    place.fail()
    with pytest.warns(CacheWarning):
        place.table.get(b"k")
    place.table.get(b"k")
    place.heal()
    place.table.return_to_disk()
    write(place.table)
    assert place.disk.get(b"new") is None


def test_it_returns_to_the_disk_when_the_lock_is_free() -> None:
    place = Place()
    place.fail(is_busy=True)
    with pytest.raises(Exception, match="the test's fault"):
        write(place.table)
    write(place.table)
    place.table.return_to_disk()
    assert place.table.get(b"new") == b"", "still in memory"
    place.heal()
    place.table.return_to_disk()
    assert place.fills == 3, "the disk is brought to the head before it is read again"
    assert place.table.get(b"new") is None
    write(place.table)
    assert place.disk.get(b"new") == b""


def test_who_holds_the_lock_for_long_is_named_once() -> None:
    place = Place()
    place.fail(is_busy=True)
    with pytest.raises(Exception, match="the test's fault"):
        write(place.table)
    place.now = 4.0
    place.table.return_to_disk()
    place.now = 6.0
    with pytest.warns(CacheWarning, match="may be stopped"):
        place.table.return_to_disk()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        place.table.return_to_disk()


def test_what_must_not_wait_leaves_the_disk_in_use() -> None:
    place = Place()
    place.fail(is_busy=True)
    with pytest.raises(Exception, match="the test's fault"), place.table.batch(wait=False):
        pass
    place.heal()
    write(place.table)
    assert place.disk.get(b"new") == b""


def in_a_child(check: Callable[[], object]) -> None:
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            check()
            os.write(write_end, b"ok")
        except BaseException as exc:  # noqa: BLE001
            os.write(write_end, repr(exc).encode())
        os._exit(0)
    os.close(write_end)
    said = os.read(read_end, 1000)
    os.waitpid(pid, 0)
    os.close(read_end)
    assert said == b"ok"


def test_a_forked_child_fills_a_table_of_its_own() -> None:
    place = Place()

    def check() -> None:
        assert place.table.get(b"k1") == b"v1"
        assert place.fills == 2
        write(place.table)
        assert place.disk.get(b"new") is None

    in_a_child(check)
    assert place.table.get(b"new") is None


def test_a_log_that_cannot_be_read_is_said_and_tried_again() -> None:
    place = Place()
    inner = place.fill

    def unreadable(_table: Table) -> None:
        raise OSError("the store is away")

    table = FailoverTable(place.disk, lambda found: unreadable(found) if place.now else inner(found))
    place.now = 1.0
    place.fail()
    with pytest.raises(OSError, match="away"):
        table.get(b"k1")
    place.now = 0.0
    with pytest.warns(CacheWarning):
        assert table.get(b"k1") == b"v1"
    assert isinstance(table._memory, MemoryTable)


def test_what_is_noted_after_a_save_fails_no_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where the log cannot be read: it is published."""
    place = Place()
    index = BlockIndex(place.table)
    place.fail()

    def fill(_: Table) -> None:
        raise BackendUnavailableError("the test's fault", object_id="log")

    monkeypatch.setattr(place.table, "_fill", fill)
    index.add([(Digest(bytes(32)), Location(Ulid(bytes(16)), 0, 0, 1, 1, 0))], published_at=1)

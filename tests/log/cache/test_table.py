"""What every table does, in memory and on disk."""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.log.cache import MAX_KEY_BYTES, MemoryTable, Table
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table
from tensorstore_ck.log.cache.protocol import prefix_end
from tests.effort import PATIENCE_SECONDS


@pytest.fixture(params=["memory", "lmdb"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    opened: Table = MemoryTable() if request.param == "memory" else open_lmdb_table(tmp_path)
    yield opened
    opened.close()


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def put(table: Table, **items: str) -> None:
    with table.batch() as batch:
        for key, value in items.items():
            batch.put(key.encode(), value.encode())


def test_a_batch_is_visible_as_a_whole_and_stays(table: Table) -> None:
    with table.batch() as batch:
        batch.put(b"a", b"1")
        batch.put(b"b", b"2")
        batch.put(b"a", b"3")
        batch.delete(b"b")
        batch.delete(b"never there")
        assert batch.get(b"a") == b"3"
        assert batch.get(b"b") is None
        assert list(batch.scan(b"")) == [(b"a", b"3")]
    assert list(table.scan(b"")) == [(b"a", b"3")]
    assert table.get(b"a") == b"3"


def test_a_batch_that_raises_leaves_nothing(table: Table) -> None:
    put(table, a="1", b="2", c="3")

    def work() -> None:
        with table.batch() as batch:
            batch.put(b"a", b"9")
            batch.delete(b"b")
            batch.clear(b"c")
            batch.put(b"d", b"9")
            batch.put(b"d", b"8")
            raise KeyError

    with pytest.raises(KeyError):
        work()
    assert list(table.scan(b"")) == [(b"a", b"1"), (b"b", b"2"), (b"c", b"3")]


@pytest.mark.usefixtures("hasty_threads")
def test_other_threads_see_all_of_a_batch_or_nothing(table: Table) -> None:
    put(table, a="0", b="0")
    seen: list[tuple[bytes | None, bytes | None]] = []
    looks, done = threading.Event(), threading.Event()

    def watch() -> None:
        while not done.is_set():
            items = dict(table.scan(b""))
            seen.append((items[b"a"], items[b"b"]))
            looks.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    assert looks.wait(PATIENCE_SECONDS)
    for number in range(200):
        put(table, a=str(number), b=str(number))
    done.set()
    watcher.join()
    assert all(a == b for a, b in seen)


@pytest.mark.usefixtures("hasty_threads")
def test_batches_of_threads_exclude_each_other(table: Table) -> None:
    put(table, counter="0")
    rounds = 3000 if isinstance(table, MemoryTable) else 100
    together = threading.Barrier(4)

    def count() -> None:
        together.wait()
        for _ in range(rounds):
            with table.batch() as batch:
                batch.put(b"counter", b"%d" % (int(batch.get(b"counter") or b"") + 1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert table.get(b"counter") == b"%d" % (4 * rounds)


def test_what_changes_during_a_scan_breaks_nothing(table: Table) -> None:
    with table.batch() as batch:
        for number in range(1000):
            batch.put(b"k%04d" % number, b"")
    keys = []
    for key, _ in table.scan(b"k"):
        keys.append(key)
        if len(keys) == 300:
            with table.batch() as batch:
                batch.clear(b"k09")
                batch.put(b"k0000a", b"")
    assert keys[:300] == [b"k%04d" % number for number in range(300)]
    assert set(keys) >= {b"k%04d" % number for number in range(900)}
    assert keys == sorted(set(keys))


def test_a_view_stays_as_it_was(table: Table) -> None:
    put(table, **{f"k{number:04}": "1" for number in range(600)})
    view = table.view(b"k")
    items, found = list(view.scan(b"k")), view.scan(b"k", reverse=True)
    first = next(found)
    with table.batch() as batch:
        batch.clear(b"")
        batch.put(b"k0000", b"2")
    assert [first, *found] == items[::-1]
    assert list(view.scan(b"k")) == items
    assert view.get(b"k0000") == b"1"
    assert list(table.scan(b"")) == list(table.view(b"k").scan(b"k")) == [(b"k0000", b"2")]


def test_keys_that_no_table_holds_are_refused(table: Table) -> None:
    with table.batch() as batch:
        batch.put(b"k" * MAX_KEY_BYTES, b"longest")
    for key in (b"", b"k" * (MAX_KEY_BYTES + 1)):
        with pytest.raises(ValueError, match="bytes"), table.batch() as batch:
            batch.put(key, b"")
        assert table.get(key) is None
    assert table.get(b"k" * MAX_KEY_BYTES) == b"longest"


def test_close_is_idempotent(table: Table) -> None:
    table.close()
    table.close()


KEYS = st.binary(min_size=1, max_size=3) | st.sampled_from([b"a", b"ab", b"\xff", b"\xff\xff", b"a\xff", b"b"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, st.binary(max_size=4)),
        st.tuples(st.just("delete"), KEYS, st.none()),
        st.tuples(st.just("clear"), st.binary(max_size=2), st.none()),
    ),
    max_size=8,
)


@settings(max_examples=60)
@given(batches=st.lists(STEPS, max_size=4), prefix=st.binary(max_size=2), low=st.none() | KEYS, reverse=st.booleans())
@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_it_is_a_sorted_dict(
    *,
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
    batches: list[list[tuple[str, bytes, bytes | None]]],
    prefix: bytes,
    low: bytes | None,
    reverse: bool,
) -> None:
    table: Table = MemoryTable() if kind == "memory" else open_lmdb_table(tmp_path_factory.mktemp("table"))
    model: dict[bytes, bytes] = {}
    for steps in batches:
        with table.batch() as batch:
            for what, key, value in steps:
                if what == "put":
                    assert value is not None
                    batch.put(key, value)
                    model[key] = value
                elif what == "delete":
                    batch.delete(key)
                    model.pop(key, None)
                else:
                    batch.clear(key)
                    model = {other: kept for other, kept in model.items() if not other.startswith(key)}
            assert list(batch.scan(b"")) == sorted(model.items())
    expected = [item for item in sorted(model.items(), reverse=reverse) if item[0].startswith(prefix)]
    assert list(table.scan(prefix, reverse=reverse)) == expected
    low = prefix if low is None else low
    high = prefix_end(prefix)
    between = [item for item in sorted(model.items(), reverse=reverse) if low <= item[0] and (high is None or item[0] < high)]
    assert table.page(low, high, reverse) == between
    table.close()


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 512, 513])
def test_scans_of_any_length_are_whole(table: Table, count: int) -> None:
    keys = [b"k%05d" % number for number in range(count)]
    with table.batch() as batch:
        for key in [b"j", *keys, b"l"]:
            batch.put(key, b"")
    assert [key for key, _ in table.scan(b"k")] == keys
    assert [key for key, _ in table.scan(b"k", reverse=True)] == keys[::-1]


def test_a_page_begins_at_its_lowest_key(table: Table) -> None:
    put(table, a="", b1="", b2="", b3="", c="")
    assert [key for key, _ in table.page(b"b2", b"c", False)] == [b"b2", b"b3"]
    assert [key for key, _ in table.page(b"b", b"b2\0", True)] == [b"b2", b"b1"]
    assert [key for key, _ in table.page(b"b", b"c", False)] == [b"b1", b"b2", b"b3"]
    assert [key for key, _ in table.page(b"c", b"c", False)] == []
    assert [key for key, _ in table.page(b"b", b"c", True)] == [b"b3", b"b2", b"b1"]


def test_pages_end_between_keys_that_begin_alike(table: Table) -> None:
    keys = [b"k" + bytes(length) for length in range(300)]
    with table.batch() as batch:
        for key in keys:
            batch.put(key, b"")
    assert [key for key, _ in table.scan(b"k")] == keys
    assert [key for key, _ in table.scan(b"k", reverse=True)] == keys[::-1]

"""Following the log: cold, warm, behind, with caches and entries that are lost, damaged or someone else's."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import (
    BackendUnavailableError,
    BrokenLogError,
    CorruptObjectError,
    MissingObjectError,
    NotFoundError,
    RetryableError,
)
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.log import LogChangedWarning, Op, RefTable, fold, table_rows
from tensorstore_ck.log.cache import CacheWarning, MemoryTable, Table
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table
from tensorstore_ck.log.entry import decode_entry, entry_name, folder_name, genesis_hash
from tensorstore_ck.log.follow import empty
from tests.log.cache.faultytable import CacheFaults, FaultyTable
from tests.log.scripted import (
    UUID,
    Tricky,
    append_puts,
    dump_of,
    follow,
    mark_op,
    names_in,
    numbers,
    open_log,
    put_op,
    sealed_by_hand,
)


def gets(backend: Tricky) -> list[str]:
    return [name for what, name in backend.calls if what == "get" and name.startswith("log/")]


def long_log(count: int) -> MemoryBackend:
    """A log without checkpoints."""
    backend, prev = MemoryBackend(), genesis_hash(UUID)
    for n in range(1, count + 1):
        sealed, prev = sealed_by_hand(n, prev, put_op("runs/gpt", n, step=n))
        backend.create(entry_name("log", n), sealed)
    return backend


@pytest.fixture(params=["memory", "lmdb"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Table]:
    (tmp_path / "cache").mkdir()
    opened: Table = MemoryTable() if request.param == "memory" else open_lmdb_table(tmp_path / "cache")
    yield opened
    opened.close()


def test_an_empty_log() -> None:
    log = open_log(MemoryBackend())
    assert log.view().head() is None
    assert log.sync().n == 0
    assert log.view().branches() == []
    assert list(log.entries()) == []


@pytest.mark.parametrize("is_local", [True, False])
def test_a_follower_sees_what_was_acknowledged(table: Table, is_local: bool) -> None:
    backend = MemoryBackend()
    writer, reader = open_log(backend), open_log(Tricky(backend, is_local=is_local), table)
    for count in (0, 1, 2, 30, 70):
        append_puts(writer, count, first=writer.sync().n)
        assert reader.sync() == writer.sync()
        assert dump_of(reader) == dump_of(writer)
    assert follow(reader.view(), "runs/gpt") == list(range(103))


def test_a_view_needs_no_sync_and_does_not_move_by_itself() -> None:
    backend = MemoryBackend()
    log, other = open_log(backend), open_log(backend)
    append_puts(log, 2)
    append_puts(other, 1, first=2)
    assert follow(log.view(), "runs/gpt") == [0, 1]
    log.sync()
    assert follow(log.view(), "runs/gpt") == [0, 1, 2]


# --- cost -----------------------------------------------------------------------------------------------------------------


def test_a_warm_start_reads_the_head_and_looks_for_the_next(table: Table) -> None:
    backend = Tricky()
    append_puts(open_log(backend, table), 20)
    backend.calls.clear()
    log = open_log(backend, table)
    log.sync()
    assert backend.calls == [("get", entry_name("log", 20)), ("get", entry_name("log", 21))]
    backend.calls.clear()
    log.sync()
    assert backend.calls == [("get", entry_name("log", 20)), ("get", entry_name("log", 21))], "the head may be gone, or another one"


def test_views_at_one_head_share_the_rows_that_they_have_read() -> None:
    faults = CacheFaults()
    log = open_log(MemoryBackend(), FaultyTable(faults))
    append_puts(log, 2)

    def look() -> tuple[int | None, int]:
        """The step of the branch, and how many reads of the table that took besides the view and its head."""
        view, before = log.view(), faults.calls
        branch, policies = view.branch("runs/gpt"), view.policies()
        assert branch is not None
        assert not policies
        return branch.step, faults.calls - before

    assert look() == (1, 2), "a row and a page"
    assert look() == (1, 0)
    append_puts(log, 1, first=2)
    assert look() == (2, 2)


def test_rows_of_a_cache_that_is_filled_again_are_read_again() -> None:
    backend, table = MemoryBackend(), MemoryTable()
    log = open_log(backend, table)
    append_puts(log, 2)
    branch = open_log(backend, table).view().branch("runs/gpt")
    with table.batch() as batch:  # bytes that decode, but are not those of the log
        table_rows.BRANCHES.put(batch, b"runs/gpt", branch._replace(step=7))  # type: ignore[union-attr]
    assert log.view().branch("runs/gpt").step == 7  # type: ignore[union-attr]
    with table.batch() as batch:
        batch.put(table_rows.HEAD.prefix, b"damaged")
    log.sync()
    assert log.view().branch("runs/gpt").step == 1  # type: ignore[union-attr]


def test_a_cold_start_reads_a_checkpoint_and_the_tail(table: Table) -> None:
    backend = Tricky()
    log = open_log(backend)
    append_puts(log, 100)
    backend.calls.clear()
    cold = open_log(backend, table)
    assert cold.sync().n == 100
    assert gets(backend) == [entry_name("log", n) for n in (64, 1, *range(65, 102))]
    assert dump_of(cold) == dump_of(log)


def test_a_cold_start_on_a_remote_backend_reads_nothing_twice() -> None:
    backend = Tricky(long_log(150), is_local=False)
    assert open_log(backend).sync().n == 150
    read = gets(backend)
    assert sorted(set(read)) == sorted(read)
    assert len(read) <= 150 + 16


# --- caches ---------------------------------------------------------------------------------------------------------------


def test_a_lost_cache_is_built_again(tmp_path: Path) -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend), 70)
    expected = dump_of(open_log(backend, _synced(backend)))
    for _ in range(2):
        (tmp_path / "cache").mkdir()
        table = open_lmdb_table(tmp_path / "cache")
        log = open_log(backend, table)
        log.sync()
        assert dump_of(log) == expected
        table.close()
        for file in (tmp_path / "cache").iterdir():
            file.unlink()
        (tmp_path / "cache").rmdir()


def _synced(backend: MemoryBackend) -> Table:
    table = MemoryTable()
    open_log(backend, table).sync()
    return table


@pytest.mark.parametrize("met_by", ["build", "view", "fold"])
def test_a_cache_that_is_damaged_meanwhile_is_built_again(tmp_path: Path, met_by: str) -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend), 5)
    table = open_lmdb_table(tmp_path)
    open_log(backend, table).sync()
    table.close()
    data = (tmp_path / "data.mdb").read_bytes()
    value = put_op("runs/gpt", 4, step=4).fields["snapshot"]  # in the branch's row, in its last move, and in the row of the root
    keys = data.count(b"r/u" + value)
    assert data.count(value) > keys > 0
    data = data.replace(value, bytes(16)).replace(b"r/u" + bytes(16), b"r/u" + value)
    (tmp_path / "data.mdb").write_bytes(data)
    table = open_lmdb_table(tmp_path)
    log = open_log(backend, table)

    def build(view: RefTable) -> list[Op]:
        return [put_op("runs/gpt", 5, step=view.branch("runs/gpt").step)]  # type: ignore[union-attr]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        match met_by:
            case "build":
                assert log.append(build).n == 6
            case "fold":
                append_puts(open_log(backend), 1, first=5)
            case "view":
                log.sync()
                assert log.view().branch("runs/gpt").step == 4  # type: ignore[union-attr]
        log.sync()
        assert follow(log.view(), "runs/gpt") == [0, 1, 2, 3, 4] + {"build": [4], "fold": [5], "view": []}[met_by]
        assert dump_of(log) == dump_of(open_log(backend, _synced(backend)))
    assert [each.category for each in caught] == [CacheWarning]
    table.close()
    again = open_log(backend, open_lmdb_table(tmp_path))
    again.sync()
    assert dump_of(again) == dump_of(log), "what was damaged is gone from the disk, too"
    again.table.close()


@pytest.mark.parametrize("row", [b"", b"\x93\x01\x02", b"\xc1", pack_body([3, genesis_hash(UUID), 99])])
def test_a_head_of_another_build_or_none_at_all_is_built_again(table: Table, row: bytes) -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend, table), 3)
    with table.batch() as batch:
        batch.put(table_rows.HEAD.prefix, row)
        batch.put(table_rows.TAGS.prefix + b"leftover", b"")
    log = open_log(backend, table)
    log.sync()
    assert dump_of(log) == dump_of(open_log(backend, _synced(backend)))


def test_rows_that_make_no_sense_are_built_again_when_they_are_met(table: Table) -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend, table), 3)
    with table.batch() as batch:
        batch.put(table_rows.BRANCHES.prefix + b"runs/gpt", b"\x00")
    append_puts(open_log(backend), 1, first=3)
    log = open_log(backend, table)
    log.sync()
    assert follow(log.view(), "runs/gpt") == [0, 1, 2, 3]


def test_the_block_index_goes_with_the_fold_that_vouched_for_it(table: Table) -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend, table), 3)
    with table.batch() as batch:
        batch.put(b"b/block", b"location")
    open_log(backend, table).sync()
    assert table.get(b"b/block") == b"location"
    with table.batch() as batch:
        batch.put(table_rows.HEAD.prefix, b"")
    open_log(backend, table).sync()
    assert table.get(b"b/block") is None


@pytest.mark.parametrize("kept", [0, 3, 5])
def test_a_store_restored_from_a_copy(table: Table, kept: int) -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend, table), 5)
    backend.delete([entry_name("log", n) for n in range(kept + 1, 6)])
    if kept == 5:
        backend.delete([entry_name("log", n) for n in range(1, 6)])
        append_puts(open_log(backend), 5, "other")
    log = open_log(backend, table)
    with pytest.warns(LogChangedWarning, match="restored from a copy"):
        assert log.sync().n == kept
    assert dump_of(log) == dump_of(open_log(backend, _synced(backend)))


def test_two_logs_of_one_host_share_the_fold(table: Table) -> None:
    backend = MemoryBackend()
    first, second = open_log(backend, table), open_log(backend, table)
    for number in range(10):
        append_puts((first, second)[number % 2], 1, first=number)
    assert dump_of(first) == dump_of(open_log(backend, _synced(backend)))


def test_operations_are_built_at_one_entry(table: Table) -> None:
    """Another process of this host folds on while `build` reads."""
    backend = MemoryBackend()
    log, other = open_log(backend, table), open_log(backend, table)
    seen: list[int] = []

    def build(view: RefTable) -> list[Op]:
        if len(seen) < 2:
            append_puts(other, 1, f"other{len(seen)}")
        seen.append(len(view.branches()))
        return [put_op("mine", 7)]

    assert log.append(build).n == 3
    assert seen == [0, 1, 2]


def test_damage_that_build_meets_is_looked_at_again_at_a_later_entry(table: Table) -> None:
    """gc of another process frees what `build` reads."""
    backend = MemoryBackend()
    log, other = open_log(backend, table), open_log(backend)
    seen: list[int] = []

    def build(view: RefTable) -> list[Op]:
        seen.append(len(view.branches()))
        if len(seen) == 1:
            append_puts(other, 1)
        raise MissingObjectError("a part is gone")

    with pytest.raises(MissingObjectError):
        log.append(build)
    assert seen == [0, 1]


@pytest.mark.parametrize("is_filled", [False, True])
def test_operations_are_not_built_on_a_table_that_lost_what_it_held(table: Table, is_filled: bool) -> None:
    """Another process of this host empties the cache while `build` reads, and may fill it again: the branch is there all the same."""
    backend = MemoryBackend()
    log, other = open_log(backend, table), open_log(backend, table)
    append_puts(log, 3)
    built: list[list[str]] = []

    def build(view: RefTable) -> list[Op]:
        with table.batch() as batch:
            empty(batch)
        built.append(view.branches())
        if is_filled:
            other.sync()
        return [mark_op(",".join(built[-1]))]

    assert log.append(build).n == 4
    assert built == [["runs/gpt"]]
    assert next(log.entries(4)).ops[0].fields["name"] == "runs/gpt"


def test_a_view_stays_at_its_entry_when_the_cache_fails(recwarn: pytest.WarningsRecorder) -> None:
    """And says so if the log is another one by then."""
    backend, faults = MemoryBackend(), CacheFaults()
    log = open_log(backend, FaultyTable(faults))
    append_puts(log, 3)
    views = [log.view() for _ in range(3)]
    append_puts(open_log(backend), 2, first=3)
    for view in views[:2]:
        faults.reset(range(1 << 30))
        assert view.branches() == ["runs/gpt"]
        assert follow(view, "runs/gpt") == [0, 1, 2]
    assert follow(log.newest_view(), "runs/gpt") == [0, 1, 2, 3, 4]
    backend.delete([entry_name("log", n) for n in range(1, 6)])
    append_puts(open_log(backend), 5, "other")
    with pytest.raises(RetryableError):
        views[2].branches()


def test_a_view_whose_head_the_cache_does_not_read_is_one_in_memory(recwarn: pytest.WarningsRecorder) -> None:
    faults = CacheFaults()
    log = open_log(MemoryBackend(), FaultyTable(faults))
    empty_view = log.view()
    append_puts(log, 3)
    faults.reset(range(1, 1 << 30))  # the view can be had
    assert follow(log.view(), "runs/gpt") == [0, 1, 2]
    assert empty_view.branches() == []


def test_a_view_is_never_behind_what_was_followed(table: Table) -> None:
    """Another process empties the table, or has folded the log only in part since."""
    backend = MemoryBackend()
    log = open_log(backend, table)
    assert log.view().head() is None, "nothing was followed yet"
    append_puts(log, 3)
    for kept in range(3):
        with table.batch() as batch:
            empty(batch)
            for n in range(1, kept + 1):
                fold(decode_entry(backend.get(entry_name("log", n), max_bytes=1 << 20), "entry", n), batch)
        assert follow(log.view(), "runs/gpt") == [0, 1, 2]


def test_a_view_of_an_emptied_table_behind_a_log_that_cannot_be_read_is_no_empty_one() -> None:
    backend, table = Tricky(), MemoryTable()
    log = open_log(backend, table)
    append_puts(log, 3)
    with table.batch() as batch:
        empty(batch)

    def fail(_what: str, _name: str) -> None:
        raise BackendUnavailableError("the test's fault")

    backend.before = fail
    with pytest.raises(BackendUnavailableError):
        log.view()


def test_a_refusal_is_looked_at_again_at_the_newest_entry(table: Table) -> None:
    """By what the host knows, the branch is not there; if the log cannot be read, that counts."""
    backend = Tricky()
    log = open_log(backend, table)
    append_puts(log, 1, "other")
    append_puts(open_log(backend.inner), 1)
    seen: list[list[str]] = []

    def decide(view: RefTable) -> int:
        seen.append(view.branches())
        if view.branch("runs/gpt") is None:
            raise NotFoundError("no such branch")
        return 7

    def fail(_what: str, _name: str) -> None:
        raise BackendUnavailableError("the test's fault")

    backend.before = fail
    with pytest.raises(NotFoundError):
        log.look(decide)
    backend.before = lambda _what, _name: None
    assert log.look(decide) == 7
    assert seen == [["other"], ["other"], ["other", "runs/gpt"]]
    assert log.look(decide) == 7, "without a look at the log"


def test_what_another_process_folded_meanwhile_is_not_folded_twice(table: Table) -> None:
    backend = Tricky()
    append_puts(open_log(backend.inner, table), 3)
    append_puts(open_log(backend.inner), 2, first=3)
    other = open_log(backend.inner, table)

    def faster(_what: str, name: str) -> None:
        if name == entry_name("log", 5):
            other.sync()

    backend.before = faster
    log = open_log(backend, table)
    log.sync()
    assert [what for what, _ in backend.calls] == ["get"] * 4, "the cache was not emptied for it"
    assert follow(log.view(), "runs/gpt") == [0, 1, 2, 3, 4]


def test_a_forked_child_goes_on_without_the_parents_cache(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path / "store"), sync=False)
    (tmp_path / "cache").mkdir()
    table = open_lmdb_table(tmp_path / "cache")
    log = open_log(backend, table)
    append_puts(log, 3)
    pid = os.fork()
    if pid == 0:
        try:
            append_puts(log, 2, first=3)
            os._exit(0 if follow(log.view(), "runs/gpt") == [0, 1, 2, 3, 4] else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    append_puts(log, 1, first=5)
    assert follow(log.view(), "runs/gpt") == [0, 1, 2, 3, 4, 5]
    table.close()


def test_threads_share_a_log() -> None:
    backend = MemoryBackend()
    log = open_log(backend)

    def work(worker: int) -> None:
        for number in range(25):
            operation = mark_op(f"{worker}.{number}")
            log.append(lambda _view, operation=operation: [operation])  # type: ignore[misc]

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = names_in(backend)
    assert sorted(found) == sorted(f"{worker}.{number}" for worker in range(4) for number in range(25))
    for worker in range(4):
        assert [name for name in found if name.startswith(f"{worker}.")] == [f"{worker}.{number}" for number in range(25)]


# --- checkpoints ----------------------------------------------------------------------------------------------------------


def checkpoint_names(backend: MemoryBackend, folder: str = "checkpoint/") -> list[int]:
    return sorted(int(info.name.rpartition("/")[2]) for info in backend.list(folder))


def test_checkpoints_come_when_the_tail_outgrows_the_last_one() -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend), 63)
    assert checkpoint_names(backend) == []
    append_puts(open_log(backend), 1, first=63)
    assert checkpoint_names(backend) == [64]
    append_puts(open_log(backend), 400, first=64)
    made = checkpoint_names(backend)
    assert len(made) > 2
    gaps = [later - earlier for earlier, later in pairwise(made)]
    assert min(gaps) >= 64
    assert gaps == sorted(gaps)


def test_at_the_most_2000_entries_have_no_checkpoint() -> None:
    backend = long_log(2100)
    log = open_log(backend)
    log.sync()
    assert checkpoint_names(backend) == [2100]
    append_puts(log, 1, first=2100)
    assert checkpoint_names(backend) == [2100]


def test_a_second_host_takes_the_first_ones_checkpoint_for_its_own() -> None:
    backend = MemoryBackend()
    first, second = open_log(backend), open_log(backend)
    append_puts(second, 1)
    append_puts(first, 70, first=1)
    second.sync()
    assert checkpoint_names(backend) == [64]


def test_a_checkpoint_does_not_outlive_its_entry() -> None:
    backend = Tricky(long_log(64))
    open_log(backend).sync()
    name = f"checkpoint/{64:020d}"
    assert [call for call in backend.calls if call[0] in ("sync_folders", "create")] == [
        ("sync_folders", entry_name("log", 64)),
        ("create", name),
    ]


def test_logs_of_another_prefix_have_checkpoints_of_their_own() -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend), 64, "old")
    log = open_log(backend, prefix="log-2", may_begin=True)
    append_puts(log, 65, "new")
    assert checkpoint_names(backend, "log-2-checkpoint/") == [64]
    again = open_log(backend, prefix="log-2")
    again.sync()
    assert again.view().branches() == ["new"]
    assert [entry.n for entry in again.entries(60)] == [60, 61, 62, 63, 64, 65]


def spoil(backend: MemoryBackend, how: str) -> None:
    name = f"checkpoint/{64:020d}"
    data = backend.get(name, max_bytes=1 << 30)
    match how:
        case "flipped":
            backend.replace(name, data[:100] + bytes([data[100] ^ 1]) + data[101:])
        case "cut":
            backend.replace(name, data[:-1])
        case "empty":
            backend.replace(name, b"")
        case "misplaced":
            backend.create(f"checkpoint/{70:020d}", data)
        case "of another log":
            other = MemoryBackend()
            append_puts(open_log(other), 64, "other")
            backend.replace(name, other.get(name, max_bytes=1 << 30))
        case "junk":
            backend.create("checkpoint/junk", b"junk")
            backend.create(f"checkpoint/{(1 << 63):020d}", b"junk")
            backend.create(f"checkpoint/{0:020d}", b"junk")


@pytest.mark.parametrize("how", ["flipped", "cut", "empty", "misplaced", "of another log", "junk"])
def test_a_checkpoint_that_does_not_fit_is_ignored(how: str) -> None:
    backend = MemoryBackend()
    log = open_log(backend)
    append_puts(log, 80)
    spoil(backend, how)
    cold = open_log(backend)
    assert cold.sync() == log.sync()
    assert dump_of(cold) == dump_of(log)


def test_a_checkpoint_of_another_version_of_the_fold_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Tricky()
    append_puts(open_log(backend), 70)
    monkeypatch.setattr(table_rows, "FOLD_VERSION", table_rows.FOLD_VERSION + 1)
    backend.calls.clear()
    open_log(backend).sync()
    assert entry_name("log", 1) in gets(backend)


def test_a_checkpoint_that_cannot_be_written_is_nobodys_error() -> None:
    backend = Tricky()

    def full(what: str, name: str) -> None:
        if what == "create" and name.startswith("checkpoint/"):
            raise BackendUnavailableError("injected: full")

    backend.before = full
    append_puts(open_log(backend), 150)
    tries = [name for what, name in backend.calls if what == "create" and name.startswith("checkpoint/")]
    assert len(tries) == 2, "tried again after 64 more entries, not at each"


# --- damage ---------------------------------------------------------------------------------------------------------------


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: bytes(byte ^ (number == at % len(data)) for number, byte in enumerate(data))


DAMAGES: list[Callable[[bytes], bytes]] = [
    *(flip(at) for at in (0, 7, 8, 30, 100, -33, -32, -1)),
    *((lambda data, size=size: (data + bytes(2 << 20))[:size]) for size in (0, 10, 100, 2 << 20)),
    lambda _: long_log(6).get(entry_name("log", 6), max_bytes=1 << 20),
    lambda _: sealed_by_hand(5, genesis_hash(bytes(16)), mark_op("of another log"))[0],
]
"""What becomes of entry 5."""


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_named(damage: Callable[[bytes], bytes]) -> None:
    backend = long_log(10)
    backend.replace(entry_name("log", 5), damage(backend.get(entry_name("log", 5), max_bytes=1 << 20)))
    with pytest.raises(BrokenLogError, match=entry_name("log", 5)):
        open_log(backend).sync()


@pytest.mark.parametrize(("missing", "is_local"), [(1, True), (2, False), (29, True), (29, False)])
def test_a_missing_entry_is_named(missing: int, is_local: bool) -> None:
    backend = Tricky(long_log(30), is_local=is_local)
    backend.inner.delete([entry_name("log", missing)])
    with pytest.raises(BrokenLogError, match=rf"{entry_name('log', missing)} is missing.*tsck salvage"):
        open_log(backend).sync()


def test_a_missing_folder_is_noticed() -> None:
    backend = long_log(2005)
    backend.delete([info.name for info in backend.list(folder_name("log", 1000))])
    with pytest.raises(BrokenLogError, match=entry_name("log", 1000)):
        open_log(backend).sync()


def test_entries_missing_at_the_end_are_noticed_by_the_checkpoint() -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend), 64)
    backend.delete([entry_name("log", 64)])
    with pytest.raises(BrokenLogError, match=entry_name("log", 64)):
        open_log(backend).sync()


def test_an_entry_missing_before_others_is_noticed_by_a_warm_follower_too() -> None:
    backend = Tricky(long_log(20), is_local=False)
    table = MemoryTable()
    log = open_log(Tricky(long_log(0)), table)
    for n in range(1, 4):
        log._follower.fold(table, [next(open_log(backend.inner).entries(n))])
    backend.inner.delete([entry_name("log", 5)])
    with pytest.raises(BrokenLogError, match=entry_name("log", 5)):
        open_log(backend, table).sync()


def test_a_replaced_entry_breaks_the_chain_at_the_next() -> None:
    backend = long_log(10)
    before = next(open_log(backend).entries(4))
    backend.replace(entry_name("log", 5), sealed_by_hand(5, before.hash, mark_op("forged"))[0])
    with pytest.raises(BrokenLogError, match=rf"{entry_name('log', 6)} does not follow"):
        open_log(backend).sync()


def test_a_log_of_another_store_is_not_followed() -> None:
    backend = MemoryBackend()
    backend.create(entry_name("log", 1), sealed_by_hand(1, genesis_hash(bytes(16)), mark_op("foreign"))[0])
    with pytest.raises(BrokenLogError, match=entry_name("log", 1)):
        open_log(backend).sync()


def test_an_entry_knows_its_number() -> None:
    sealed, _ = sealed_by_hand(5, genesis_hash(UUID), mark_op("five"))
    assert decode_entry(sealed, "entry", 5).n == 5
    with pytest.raises(CorruptObjectError, match="number is 5"):
        decode_entry(sealed, "entry", 6)


def test_what_is_not_an_entry_is_not_taken_for_one() -> None:
    backend = long_log(3)
    for name in ("log/note", f"{folder_name('log', 0)}tmp", f"{folder_name('log', 0)}{5:020d}.tmp", f"{folder_name('log', 0)}{1234:020d}"):
        backend.create(name, b"x")
    assert open_log(backend).sync().n == 3


class Lagging(Tricky):
    """Entry 3 is not there when it is first asked for; it and its successor come before the answer for the successor."""

    def __init__(self, inner: MemoryBackend, late: dict[str, bytes]) -> None:
        super().__init__(inner, is_local=False)
        self.late = late
        self.came = threading.Event()

    def get(self, name: str, *, max_bytes: int) -> bytes:
        if name == entry_name("log", 3) and not self.came.is_set():
            for other, data in self.late.items():
                self.inner.create(other, data)
            self.came.set()
            raise MissingObjectError("not yet", object_id=name)
        if name == entry_name("log", 4):
            self.came.wait()
        return super().get(name, max_bytes=max_bytes)


def test_entries_that_come_while_others_are_read_are_no_gap() -> None:
    backend = long_log(4)
    table = MemoryTable()
    late = {entry_name("log", n): backend.get(entry_name("log", n), max_bytes=1 << 20) for n in (3, 4)}
    backend.delete(list(late))
    log = open_log(backend, table)
    log.sync()
    assert log.sync().n == 2
    lagging = Lagging(backend, late)
    first = open_log(lagging, _folded(backend, 1))
    assert first.sync().n >= 3
    assert first.sync().n == 4


def _folded(backend: MemoryBackend, count: int) -> Table:
    table = MemoryTable()
    log = open_log(MemoryBackend(), table)
    for entry in open_log(backend).entries():
        if entry.n <= count:
            log._follower.fold(table, [entry])
    return table


def test_entries_from_anywhere() -> None:
    log = open_log(long_log(40))
    assert numbers(log.entries()) == list(range(1, 41))
    assert numbers(log.entries(38)) == [38, 39, 40]
    assert numbers(log.entries(41)) == []
    assert numbers(log.entries(100)) == []


def test_no_warning_without_a_reason() -> None:
    backend = MemoryBackend()
    table = MemoryTable()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        append_puts(open_log(backend, table), 3)
        open_log(backend, table).sync()

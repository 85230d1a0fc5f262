"""The table on disk: sharing, growth, forks and damage."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest

from tensorstore_ck.log.cache import Table, TableBusyError, TableDamagedError, lmdb_table
from tensorstore_ck.log.cache import lmdb_environment as environment_module
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table
from tests.effort import PATIENCE_SECONDS


def fill(table: Table, count: int, prefix: bytes = b"k") -> None:
    with table.batch() as batch:
        for number in range(count):
            batch.put(prefix + b"%06d" % number, b"v" * 1000)


def in_another_process(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    program = "import sys; from pathlib import Path; from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table\n"
    program += f"table = open_lmdb_table(Path({str(folder)!r}))\n" + textwrap.dedent(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )


def test_two_users_of_one_process_share_an_environment(tmp_path: Path) -> None:
    first, second = open_lmdb_table(tmp_path), open_lmdb_table(tmp_path / "." / "")
    fill(first, 3)
    assert len(list(second.scan(b"k"))) == 3
    first.close()
    first.close()
    assert len(list(second.scan(b"k"))) == 3
    second.close()
    third = open_lmdb_table(tmp_path)
    assert len(list(third.scan(b"k"))) == 3
    third.close()


def test_what_was_closed_is_an_error(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 1)
    table.close()
    with pytest.raises(TableDamagedError, match="closed"):
        table.get(b"k000000")
    with pytest.raises(TableDamagedError, match="closed"):
        fill(table, 1)


def test_it_grows_within_a_batch_that_keeps_what_it_read_and_wrote(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path, map_bytes=1 << 16)
    fill(table, 10, b"a")
    with table.batch() as batch:
        batch.delete(b"a000000")
        for number in range(2000):
            batch.put(b"k%06d" % number, b"v" * 1000)
        batch.clear(b"a00000")
        assert batch.get(b"a000001") is None
        assert batch.get(b"k000000") == b"v" * 1000
    assert len(list(table.scan(b""))) == 2000
    table.close()
    again = open_lmdb_table(tmp_path, map_bytes=1 << 16)
    assert len(list(again.scan(b""))) == 2000
    again.close()


def test_it_grows_while_other_threads_read(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path, map_bytes=1 << 16)
    fill(table, 20)
    wrong: list[object] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            if table.get(b"k000001") != b"v" * 1000 or len(list(table.scan(b"k0000"))) < 20:
                wrong.append("lost")

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for count in (100, 1000, 4000):
        fill(table, count)
    done.set()
    for reader in readers:
        reader.join()
    table.close()
    assert not wrong


def test_another_process_made_it_larger(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path, map_bytes=1 << 16)
    fill(table, 3)

    def enlarge(count: int) -> None:
        put = f"for number in range({count}): batch.put(b'k%06d' % number, b'v' * 1000)"
        in_another_process(tmp_path, f"with table.batch() as batch:\n    {put}\ntable.close()")

    enlarge(1000)
    assert len(list(table.scan(b"k"))) == 1000, "a reader takes over its size"
    enlarge(5000)
    with table.batch() as batch:  # so does a writer
        batch.put(b"k", b"")
    assert len(list(table.scan(b"k"))) == 5001
    table.close()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_view_stays_as_it_was_when_the_map_grows(tmp_path: Path, is_own: bool) -> None:
    table = open_lmdb_table(tmp_path, map_bytes=1 << 16)
    fill(table, 20, b"a")
    fill(table, 3, b"b")
    view = table.view(b"a")
    if is_own:
        fill(table, 2000)
    else:
        in_another_process(
            tmp_path,
            """
            with table.batch() as batch:
                for number in range(2000):
                    batch.put(b"k%06d" % number, b"v" * 1000)
            """,
        )
    with table.batch() as batch:
        batch.clear(b"a")
    assert len(list(table.scan(b"k"))) == 2000
    assert view.get(b"a000000") == b"v" * 1000
    assert len(list(view.scan(b"a"))) == 20
    table.close()


def test_what_a_view_does_not_use_any_more_is_written_again(tmp_path: Path) -> None:
    """Views that were dropped do not make the file grow."""
    table = open_lmdb_table(tmp_path)
    for _ in range(50):
        view = table.view(b"")
        fill(table, 10)
        assert len(list(view.scan(b"k"))) in {0, 10}
    assert (tmp_path / "data.mdb").stat().st_size < 20 * 10 * 1000
    table.close()


def test_a_view_of_a_table_that_was_closed_is_an_error(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 1)
    view = table.view(b"k")
    table.close()
    with pytest.raises(TableDamagedError, match="closed"):
        view.get(b"k000000")


def test_a_view_in_a_forked_child_is_an_error_and_stays_the_parents(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 100)
    view = table.view(b"k")
    pid = os.fork()
    if pid == 0:
        try:
            view.get(b"k000000")
        except TableDamagedError:
            del view
            gc.collect()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    with table.batch() as batch:
        batch.clear(b"k")
    for number in range(5):  # which would use the pages of the view again, if its slot were free
        fill(table, 100, b"m%d" % number)
    assert len(list(view.scan(b"k"))) == 100
    table.close()


def test_a_forked_child_has_a_table_of_its_own(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 3)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with table.batch():
            held.set()
            release.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:  # the thread that holds every lock does not exist here
        try:
            with pytest.raises(TableDamagedError, match="parent"):
                table.get(b"k000000")
            with pytest.raises(TableDamagedError, match="parent"):
                fill(table, 1, b"child")
            mine = open_lmdb_table(tmp_path)
            assert list(mine.scan(b"")) == []
            fill(mine, 1, b"other")
            mine.close()
            table.close()
            os.write(write_end, b"ok")
        except BaseException as exc:  # noqa: BLE001
            os.write(write_end, repr(exc).encode())
        os._exit(0)
    os.close(write_end)
    assert os.read(read_end, 1000) == b"ok"
    os.waitpid(pid, 0)
    os.close(read_end)
    release.set()
    holder.join()
    assert [key for key, _ in table.scan(b"")] == [b"k000000", b"k000001", b"k000002"]
    fill(table, 4)
    table.close()


def test_importing_the_package_does_not_load_lmdb() -> None:
    program = "import sys, tensorstore_ck.log.cache; sys.exit('lmdb' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=PATIENCE_SECONDS)


# --- damage ---------------------------------------------------------------------------------------------------------------


def damage(folder: Path, kind: str) -> None:
    data = folder / "data.mdb"
    match kind:
        case "garbage":
            data.write_bytes(os.urandom(100_000))
        case "empty lock":
            (folder / "lock.mdb").write_bytes(b"x" * 10)
        case "cut short":
            os.truncate(data, data.stat().st_size // 2)
        case "no data":
            data.write_bytes(b"")
        case "gone":
            data.unlink()


@pytest.mark.parametrize("kind", ["garbage", "cut short", "no data", "gone", "empty lock"])
def test_a_damaged_environment_is_made_again_when_it_is_opened(tmp_path: Path, kind: str) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 500)
    table.close()
    damage(tmp_path, kind)
    table = open_lmdb_table(tmp_path)
    assert len(list(table.scan(b"k"))) in ({0, 500} if kind == "empty lock" else {0})
    fill(table, 5)
    table.close()
    table = open_lmdb_table(tmp_path)
    assert len(list(table.scan(b"k000"))) in ({5, 500} if kind == "empty lock" else {5})
    table.close()


def flip_value(folder: Path) -> None:
    data = bytearray((folder / "data.mdb").read_bytes())
    at = data.index(b"precious")
    while at >= 0:
        data[at] ^= 1
        at = data.find(b"precious", at)
    (folder / "data.mdb").write_bytes(data)


def get_in_batch(table: Table) -> None:
    with table.batch() as batch:
        batch.get(b"key")


def scan_in_batch(table: Table) -> None:
    with table.batch() as batch:
        list(batch.scan(b""))


@pytest.mark.parametrize("read", [lambda table: table.get(b"key"), lambda table: list(table.scan(b"")), get_in_batch, scan_in_batch])
def test_a_flipped_bit_is_never_returned(tmp_path: Path, read: Callable[[Table], object]) -> None:
    table = open_lmdb_table(tmp_path)
    with table.batch() as batch:
        batch.put(b"key", b"precious")
    table.close()
    flip_value(tmp_path)
    table = open_lmdb_table(tmp_path)
    for use in (read, read, get_in_batch):
        with pytest.raises(TableDamagedError, match="checksum"):
            use(table)
    table.close()
    table = open_lmdb_table(tmp_path)
    assert list(table.scan(b"")) == []
    with table.batch() as batch:
        batch.put(b"key", b"precious")
    table.close()
    table = open_lmdb_table(tmp_path)
    assert table.get(b"key") == b"precious"
    table.close()


@pytest.mark.parametrize("error", [lmdb.DiskError("no space"), lmdb.MemoryError("none"), lmdb.CorruptedError("bad")])
def test_an_environment_that_failed_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 1)

    def broken(_txn: object, _key: bytes) -> bytes:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(lmdb_table, "get_row", broken)
        with pytest.raises(TableDamagedError):
            table.get(b"k000000")
    with pytest.raises(TableDamagedError):
        table.get(b"k000000")
    table.close()
    table = open_lmdb_table(tmp_path)
    is_damage = isinstance(error, lmdb.CorruptedError)
    assert (table.get(b"k000000") is None) is is_damage, "a full disk is no reason to throw away what all processes share"
    table.close()


@pytest.mark.parametrize("kind", ["garbage", "cut short", "no data"])
@pytest.mark.parametrize("use", [lambda table: table.get(b"k000001"), lambda table: list(table.scan(b"k")), lambda table: fill(table, 1)])
def test_a_file_that_is_cut_or_overwritten_while_it_is_mapped_is_an_error_and_no_crash(
    tmp_path: Path, kind: str, use: Callable[[Table], object]
) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 500)
    damage(tmp_path, kind)
    with pytest.raises(TableDamagedError, match="cut short"):
        use(table)
    table.close()


# --- the lock -------------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, threading
from pathlib import Path
from tensorstore_ck.log.cache.lmdb_environment import BatchLock
lock = BatchLock(Path(sys.argv[1]) / "batch.lock", 1.0)
with lock.held(wait=True):
    print("held", flush=True)
    for line in sys.stdin:
        if line == "release\\n":
            break
        lock.show_progress()
        print("moved", flush=True)
print("released", flush=True)
sys.stdin.read()
"""


class Holder:
    """Another process that holds the lock of a table's folder."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", HOLDER, str(folder)]
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        assert self.read() == "held"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def say(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        return self.read()

    def end(self) -> None:
        self.process.communicate(timeout=PATIENCE_SECONDS)


def test_another_lock_of_the_same_process_is_progress(tmp_path: Path) -> None:
    """A waiting process may never look while the lock is free."""
    seen = set[bytes]()
    for _ in range(3):
        table = open_lmdb_table(tmp_path)
        table.close()
        seen.add((tmp_path / "batch.lock").read_bytes())
    assert len(seen) == 3


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    holder = Holder(tmp_path)
    yield holder
    holder.end()


def test_a_process_that_stands_still_with_the_lock_holds_up_nobody(tmp_path: Path, holder: Holder) -> None:
    table = open_lmdb_table(tmp_path, patience_seconds=0.01)
    message = f"process {holder.process.pid} holds"
    with pytest.raises(TableBusyError, match=message):
        table.get(b"k")
    with pytest.raises(TableBusyError, match=message):
        list(table.scan(b""))
    with pytest.raises(TableBusyError, match=message):
        fill(table, 1)
    holder.say("release")
    fill(table, 2)
    assert len(list(table.scan(b"k"))) == 2
    table.close()


def test_a_process_that_is_stopped_with_the_lock_is_not_waited_for(tmp_path: Path, holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_lmdb_table(tmp_path, patience_seconds=0.0)
    holder.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, holder.process.pid, os.WSTOPPED | os.WNOWAIT)
    monkeypatch.setattr(
        environment_module, "time", SimpleNamespace(sleep=lambda _: None, monotonic=lambda: 0.0, monotonic_ns=lambda: 0)
    )  # a clock that stands still
    with pytest.raises(TableBusyError):
        fill(table, 1)
    monkeypatch.undo()
    holder.process.send_signal(signal.SIGCONT)
    holder.say("release")
    fill(table, 1)
    table.close()


def test_what_must_not_wait_does_not(tmp_path: Path, holder: Holder) -> None:
    table = open_lmdb_table(tmp_path, patience_seconds=0.01)
    with pytest.raises(TableBusyError), table.batch(wait=False):
        pass
    holder.say("release")
    with table.batch(wait=False) as batch:
        batch.put(b"k", b"v")
    assert table.get(b"k") == b"v"
    table.close()


def test_a_holder_that_works_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that runs out at the second look, unless the holder shows progress between them."""
    table = open_lmdb_table(tmp_path, patience_seconds=1.0)
    holder, looks = Holder(tmp_path), 0

    def sleep(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        holder.say("release" if looks == 50 else "move")

    monkeypatch.setattr(environment_module, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: looks * 0.6, monotonic_ns=lambda: 0))
    fill(table, 2)
    assert looks == 50
    assert len(list(table.scan(b"k"))) == 2
    table.close()
    holder.end()


def test_readers_that_were_killed_are_cleared(tmp_path: Path) -> None:
    """By the next process that opens it, though others have it open all the time; with the last of them all would be gone anyway."""
    table = open_lmdb_table(tmp_path)

    def readers() -> int:
        found: str = table.open(wait=True)._lmdb.readers()  # type: ignore[attr-defined]
        return found.count("\n") - 1

    with pytest.raises(subprocess.CalledProcessError):
        in_another_process(tmp_path, "txn = table._environment.begin(write=False)\nimport os; os.kill(os.getpid(), 9)")
    assert readers() == 1
    in_another_process(tmp_path, "table.close()")
    assert readers() == 0
    table.close()


def test_a_table_that_is_closed_before_a_batch_begins_touches_no_other_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of its files are those of other files then."""
    (tmp_path / "cache").mkdir()
    table = open_lmdb_table(tmp_path / "cache")
    environment = table.open(wait=True)  # type: ignore[attr-defined]
    usable, has_looked, goes_on = environment._require_usable, threading.Event(), threading.Event()

    def look() -> None:
        usable()
        if not has_looked.is_set():
            has_looked.set()
            assert goes_on.wait(PATIENCE_SECONDS)

    monkeypatch.setattr(environment, "_require_usable", look)
    errors: list[Exception] = []

    def write() -> None:
        try:
            fill(table, 1)
        except TableDamagedError as exc:
            errors.append(exc)

    thread = threading.Thread(target=write)
    thread.start()
    assert has_looked.wait(PATIENCE_SECONDS)
    table.close()
    others = [(tmp_path / str(number)).open("w+b", buffering=0) for number in range(8)]
    for other in others:
        other.write(b"somebody's data")
    goes_on.set()
    thread.join()
    assert [(tmp_path / str(number)).read_bytes() for number in range(8)] == [b"somebody's data"] * 8
    for other in others:
        other.close()
    assert "closed" in str(errors[0])


def test_a_batch_that_gives_back_pages_at_the_end_leaves_no_file_that_looks_cut(tmp_path: Path) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 500)
    for start in range(50):
        with table.batch() as batch:
            batch.clear(b"k%05d" % start)
    with table.batch() as batch:  # with free pages to write in place, those at the end are left out
        batch.put(b"large", bytes(1 << 20))
        batch.delete(b"large")
        batch.put(b"small", b"v")
    assert table.get(b"small") == b"v"
    table.close()
    again = open_lmdb_table(tmp_path)
    assert again.get(b"small") == b"v"
    again.close()


def test_a_file_that_grows_during_a_look_at_it_is_not_taken_for_one_that_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = open_lmdb_table(tmp_path)
    fill(table, 1)
    in_another_process(tmp_path, "with table.batch() as batch: batch.put(b'one', b'v')")  # so that the next read looks at the file
    pread = os.pread
    grown: list[bool] = []

    def grow_first(*args: int) -> bytes:
        if not grown:
            grown.append(True)
            in_another_process(tmp_path, "with table.batch() as batch:\n    for n in range(900): batch.put(b'n%d' % n, b'v' * 1000)")
        return pread(*args)

    monkeypatch.setattr(environment_module, "_CHECK_TRIES", 1)
    monkeypatch.setattr(os, "pread", grow_first)
    assert table.get(b"one") == b"v"
    assert grown
    table.close()


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="Linux only")
def test_the_kernel_reads_ahead_in_small_files_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups in a large block index are random: else each reads megabytes."""

    def reads_ahead() -> bool:
        table = open_lmdb_table(tmp_path)
        try:
            fill(table, 300)
            maps = Path("/proc/self/smaps").read_text().split(f"{tmp_path}/data.mdb\n")[1]
            return " rr " not in maps.partition("VmFlags:")[2].partition("\n")[0]
        finally:
            table.close()

    assert reads_ahead()
    monkeypatch.setattr(environment_module, "READ_AHEAD_BELOW_BYTES", 100_000)
    assert not reads_ahead()

"""What processes leave behind that were killed: freed at once where this host knows that they have ended, and else when it is old."""

import os
import shlex
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import parse_ulid, series_of
from tensorstore_ck.common.processes import Process, this_process
from tensorstore_ck.format.writer_record import SERIES_SECONDS
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.store import Store
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.gc.stores import Clock, contents, counts, leave_orphans, open_store, require_sound, sizes, state

DAY = 86_400
GENTLE = GcOptions(max_delete=1)


@pytest.fixture
def us() -> Process:
    found = this_process()
    if found is None:
        pytest.skip("this system does not say which process this is")
    return found


@pytest.fixture
def ended(us: Process) -> Process:
    """One that had our number before us."""
    return us._replace(start_ticks=us.start_ticks - 1)


def records(backend: Backend) -> list[str]:
    return [info.name for info in backend.list("writers/")]


# --- real processes -----------------------------------------------------------------------------------------------------


class Strikes(Faults):
    """Calls `strike` before or after the first call whose description begins with `what`."""

    def __init__(self, what: str, strike: Callable[[], object], *, after: bool) -> None:
        super().__init__()
        self._what, self._strike, self._after = what, strike, after

    def call(self, what: str, effect: Callable[[], object], tear: object = None, *, create: bool = False) -> object:
        hit = what.startswith(self._what) and not self.struck
        self.struck = self.struck or what if hit else self.struck
        if hit and not self._after:
            self._strike()
        result = effect()
        if hit and self._after:
            self._strike()
        return result


def put_in_child(url: Path, cache: Path, step: int, what: str, strike: Callable[[Store], object], *, after: bool = True) -> int:
    """Forks a process that saves a step, and does `strike` at a call to the backend, when its writer record is there; its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads
        store = tsck.open(url, cache_dir=cache)
        ids = store.engine.put_ids
        assert ids is not None

        def strike_once_recorded(*_: object, **__: object) -> None:
            assert ids._thread is not None
            ids._thread.join(PATIENCE_SECONDS)
            strike(store)

        faults = Strikes(what, strike_once_recorded, after=after)
        store.engine.backend = FaultyBackend(store.engine.backend, faults, atomic_put=True)
        if what == "publish":
            store.engine.log.append = strike_once_recorded  # type: ignore[method-assign, assignment]
        store.put_snapshot(state(step, size=200_000), ref="job", step=step, expect=tsck.ANY)
        store.close()
        os._exit(0)
    finally:
        os._exit(1)


def kill_yourself(_: Store) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


MOMENTS = [("append", True), ("close", False), ("close", True), ("put parts/", False), ("put parts/", True), ("put snapshots/", True)]


def test_a_crash_loop_is_freed_by_the_command_that_usage_prints(tmp_path: Path, us: Process) -> None:
    url, cache = tmp_path / "ck", tmp_path / "cache"
    with tsck.open(url, create=True, cache_dir=cache) as store:
        store.put_snapshot(state(0, size=100_000), ref="job", step=0)
        before = store.usage()
    assert before.freeable.now_bytes == 0
    assert before.freeable.later == ()
    backend = LocalBackend(str(url))
    sound_bytes = sum(sizes(backend).values())
    for step, (what, after) in enumerate([*MOMENTS, ("publish", False)], start=1):
        pid = put_in_child(url, cache, step, what, kill_yourself, after=after)
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    crashed = sizes(backend)
    with tsck.open(url, cache_dir=cache) as store:
        usage = store.usage()
        assert usage.freeable.later == ()
        assert usage.freeable.now_bytes == sum(crashed.values()) - sound_bytes > 1_000_000
    printed = _tsck(f"tsck usage -s {url}", cache)
    assert f"`{usage.freeable.command}` frees it" in printed
    said = _tsck(usage.freeable.command, cache)
    assert "freed: " in said
    assert sum(crashed.values()) - sum(sizes(backend).values()) == usage.freeable.now_bytes
    assert records(backend) == []
    with tsck.open(url, cache_dir=cache) as store:
        after_gc = store.usage()
        assert (after_gc.freeable.now_bytes, after_gc.freeable.later, after_gc.unreferenced_bytes) == (0, (), 0)
        assert replace(after_gc, objects_bytes=0, space=before.space) == replace(before, objects_bytes=0)
        require_sound(store, {"job": state(0, size=100_000)})


def _tsck(command: str, cache: Path) -> str:
    words = shlex.split(command)
    assert words[0] == "tsck"
    result = CliRunner().invoke(main, words[1:], env={"TSCK_CACHE_DIR": str(cache)}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_a_save_of_a_living_process_is_left_alone(tmp_path: Path, us: Process) -> None:
    url, cache = tmp_path / "ck", tmp_path / "cache"
    with tsck.open(url, create=True, cache_dir=cache) as store:
        store.put_snapshot(state(0, size=100_000), ref="job", step=0)
    ready, go = os.pipe(), os.pipe()

    def wait(_: Store) -> None:
        os.write(ready[1], b"!")
        os.read(go[0], 1)

    alive = put_in_child(url, cache, 1, "put parts/", wait)
    try:
        os.read(ready[0], 1)
        killed = put_in_child(url, cache, 2, "put parts/", kill_yourself)
        os.waitpid(killed, 0)
        backend = LocalBackend(str(url))
        with tsck.open(url, cache_dir=cache) as store:
            crashed = sum(sizes(backend).values())
            report = store.gc(GENTLE)
            assert report.deleted == {"pack": 1, "part": 1, "snapshot": 0, "moved": 0}
            [later] = report.later
            assert (later.why, later.objects) == ("age", 2)
            left = sizes(backend)
            assert crashed - sum(left.values()) == report.freed_bytes
            os.write(go[1], b"!")
            status = os.waitpid(alive, 0)[1]
            alive = 0
            assert status == 0
            assert left.items() <= sizes(backend).items()
            assert len(sizes(backend)) == len(left) + 1, "the record alone: nothing was written a second time"
            require_sound(store, {"job@0": state(0, size=100_000), "job": state(1, size=200_000)})
    finally:
        if alive:
            os.kill(alive, signal.SIGKILL)
            os.waitpid(alive, 0)


# --- whose they are -----------------------------------------------------------------------------------------------------


def crashed_store(process: Process | None) -> tuple[MemoryBackend, Clock]:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    open_store(backend, clock=clock).put_snapshot(state(1, 2, 3), ref="job", step=1)
    leave_orphans(backend, state(4), process=process)
    return backend, clock


def test_leftovers_of_an_ended_process_are_freed_at_once(us: Process, ended: Process) -> None:
    backend, clock = crashed_store(ended)
    store = open_store(backend, clock=clock, process=us)
    plan = store.gc(GENTLE, dry_run=True)
    assert records(backend) != []
    report = store.gc(GENTLE)
    assert replace(plan, dry_run=False) == report
    assert report.deleted == {"pack": 1, "part": 1, "snapshot": 1, "moved": 0}
    assert (report.young, report.later, records(backend)) == (0, (), [])
    require_sound(store, {"job": state(1, 2, 3)})


@pytest.mark.parametrize("whose", ["alive", "host", "namespace", "boot", "nobody"])
def test_all_others_wait_until_they_are_old_and_are_said_to(us: Process, ended: Process, whose: str) -> None:
    process = {
        "alive": us,
        "host": ended._replace(host="elsewhere/1"),
        "namespace": ended._replace(pid_namespace="pid:[1]"),
        "boot": ended._replace(boot_id="before", pid_namespace="pid:[1]"),
        "nobody": None,
    }[whose]
    backend, clock = crashed_store(process)
    store = open_store(backend, clock=clock, process=us)
    before = sizes(backend)
    written_ns = clock()
    clock.advance(DAY - 1)
    for report in (store.gc(dry_run=True), store.gc()):
        assert (report.freed_bytes, report.young) == (0, 3)
        [later] = report.later
        assert (later.why, later.objects, later.due_ns) == ("age", 3, written_ns + DAY * 10**9)
        assert later.commands == ("tsck gc --min-age 0s -s memory:",)
        assert "2033-05-19T03:33:20Z" in later.describe()
    assert store.usage().freeable.later == (later,)
    assert sizes(backend) == before
    clock.advance(1)
    assert store.gc().freed_bytes == later.bytes == sum(before.values()) - sum(sizes(backend).values())
    assert counts(backend) == {"packs": 1, "parts": 1, "snapshots": 1, "moved": 0}


def test_who_does_not_know_itself_knows_nothing_of_others(ended: Process) -> None:
    backend, clock = crashed_store(ended)
    assert open_store(backend, clock=clock).gc().young == 3


@pytest.mark.parametrize("damage", [b"", b"TSCKWRIT", bytes(100)])
def test_a_damaged_record_proves_nothing(us: Process, ended: Process, damage: bytes) -> None:
    backend, clock = crashed_store(ended)
    [name] = records(backend)
    backend.replace(name, damage)
    store = open_store(backend, clock=clock, process=us)
    assert store.gc().young == 3
    assert store.fsck(read_data=True).ok


def test_the_record_of_another_series_proves_nothing(us: Process, ended: Process) -> None:
    backend, clock = crashed_store(ended)
    [name] = records(backend)
    data = backend.get(name, max_bytes=1000)
    backend.delete([name])
    leave_orphans(backend, state(5), process=us)
    [alive] = records(backend)
    backend.replace(alive, data)
    assert open_store(backend, clock=clock, process=us).gc().young == 6


def test_what_an_ended_process_published_stays(us: Process, ended: Process) -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    open_store(backend, clock=clock, process=ended).put_snapshot(state(1), ref="job", step=1)
    store = open_store(backend, clock=clock, process=us)
    before = sizes(backend)
    assert store.gc(GENTLE).deleted_bytes == 0
    assert sizes(backend) == before
    store.forget("job")
    report = store.gc(replace(GENTLE, undo_window_seconds=0))
    assert (report.young, report.deleted["pack"]) == (0, 1), "nothing that nobody holds is of a save under way"


def test_grace_holds_for_them_too(us: Process, ended: Process) -> None:
    backend, clock = crashed_store(ended)
    store = open_store(backend, clock=clock, process=us)
    options = replace(GENTLE, grace_seconds=60)
    report = store.gc(options)
    assert (report.deleted_bytes, report.waiting) == (0, 3)
    [later] = report.later
    assert (later.why, later.due_ns) == ("grace", clock() + 60 * 10**9)
    clock.advance(60)
    assert store.gc(options).freed_bytes == later.bytes


# --- the records --------------------------------------------------------------------------------------------------------


def test_records_do_not_pile_up(us: Process, ended: Process) -> None:
    """Of processes that left nothing behind, or elsewhere: until they are too old to say anything."""
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock, process=us)
    store.put_snapshot(state(1), ref="job", step=1)
    ids = store.engine.put_ids
    assert ids is not None
    assert ids._thread is not None
    ids._thread.join(PATIENCE_SECONDS)
    leave_orphans(backend, state(2), process=ended._replace(host="elsewhere/1"))
    assert len(records(backend)) == 2
    clock.advance(SERIES_SECONDS + DAY)
    store.gc(GENTLE)
    assert len(records(backend)) == 2
    clock.advance(1)
    before = contents(backend, "writers/")
    store.gc(dry_run=True)
    assert contents(backend, "writers/") == before
    store.gc(GENTLE)
    assert records(backend) == []


def test_a_job_that_ends_in_order_leaves_no_record(us: Process) -> None:
    backend = MemoryBackend()
    with open_store(backend, process=us) as store:
        for step in range(3):
            store.put_snapshot(state(step), ref="job", step=step)
    assert records(backend) == []


def test_fsck_salvage_and_copy_take_no_notice(us: Process, tmp_path: Path) -> None:
    url = tmp_path / "ck"
    with tsck.open(url, create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(state(1), ref="job", step=1)
        assert store.engine.put_ids is not None
        store.engine.put_ids()  # as if a second save were in progress
    assert len(records(LocalBackend(str(url)))) == 1
    cache = tmp_path / "cache"
    assert "no errors" in (said := _tsck(f"tsck fsck --read-data -s {url}", cache))
    assert "notice" not in said
    assert "nothing to do" in _tsck(f"tsck salvage --dry-run -s {url}", cache)
    _tsck(f"tsck init {tmp_path / 'other'}", cache)
    _tsck(f"tsck copy {url} {tmp_path / 'other'}", cache)
    assert records(LocalBackend(str(tmp_path / "other"))) == []
    with tsck.open(tmp_path / "other", cache_dir=cache) as other:
        require_sound(other, {"job": state(1)})


def test_what_is_staged_is_of_no_series(us: Process, tmp_path: Path) -> None:
    """A process that stages may die, and the next one goes on with it: gc must not take it for left behind."""
    url = tmp_path / "ck"
    with tsck.open(url, create=True, cache_dir=tmp_path / "cache", staging=tsck.Staging(tmp_path / "stage", capacity="64MiB")) as store:
        for step in (1, 2, 3):
            store.put_snapshot(state(step, 7), ref="job", step=step)
    backend = LocalBackend(str(url))
    assert records(backend) == []
    ulids = [parse_ulid(name[-26:]) for name in sizes(backend)]
    assert len(ulids) == 9
    assert len({series_of(ulid) for ulid in ulids if ulid is not None}) == 9

"""Each run of gc, fsck or repair leaves one entry in the log with its outcome, unless it may not; and its result is the same."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import GcRefusedError, PermissionDeniedError
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log import Op
from tensorstore_ck.log.entry import entry_name
from tests.gc.stores import AT_ONCE, Clock, contents, leave_orphans, open_store, put_all, sizes, state


def begun(*numbers: int) -> tuple[MemoryBackend, tsck.Store]:
    """A store with these states on job."""
    backend = MemoryBackend()
    store = open_store(backend)
    put_all(store, "job", [state(number) for number in numbers])
    return backend, store


def operations_after(store: tsck.Store, n: int) -> list[str]:
    return [op.name for entry in store.engine.log.entries(n + 1) for op in entry.ops]


def head_of(store: tsck.Store) -> int:
    return store.engine.log.sync().n


def test_gc_notes_what_it_freed_and_what_is_left() -> None:
    clock = Clock()
    backend = MemoryBackend(clock=clock)
    store = open_store(backend, clock=clock)
    put_all(store, "job", [state(1), state(2)])
    put_all(store, "kept", [state(3), state(4)])
    store.forget("job")
    clock.advance(100)
    store.forget("kept@1")
    leave_orphans(backend, state(9))
    report = store.gc(GcOptions(min_age_seconds=50, undo_window_seconds=50, max_delete=1))
    assert report.not_recorded == ""
    noted = store.last_runs()["gc"]
    assert (noted.run, noted.outcome, noted.ok, noted.message) == ("gc", "ok", True, "")
    assert (noted.time_ns, noted.entry) == (clock.now_ns, head_of(store))
    assert noted.counts["snapshots"] == noted.counts["deleted_snapshots"] == 2
    assert noted.counts["deleted_bytes"] == report.deleted_bytes > 10_000
    assert noted.counts["stored_bytes"] == sum(sizes(backend).values())
    assert noted.counts["undo_bytes"] > 5000
    assert noted.counts["unreferenced_bytes"] > 5000, "what a save left behind, until it is old enough"
    assert noted.counts["live_bytes"] == sum(noted.counts[f"{name}_bytes"] * sign for name, sign in SIGNS.items())
    before = head_of(store)
    store.gc(GcOptions(min_age_seconds=50, undo_window_seconds=50, max_delete=1))
    assert operations_after(store, before) == ["report"], "one entry, also of a run that had nothing to do"
    assert store.last_runs()["gc"].counts["deleted_bytes"] == 0


SIGNS = {"stored": 1, "unreferenced": -1, "undo": -1}


def test_a_gc_that_refuses_notes_why() -> None:
    store = open_store()
    put_all(store, "job", [state(1), state(2)])
    store.forget("job@1")
    with pytest.raises(GcRefusedError):
        store.gc(GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=0.01))
    noted = store.last_runs()["gc"]
    assert (noted.outcome, noted.ok) == ("refused", False)
    assert "would be deleted" in noted.message


def test_fsck_notes_what_it_found_and_repair_what_is_left() -> None:
    backend, store = begun(1, 2)
    before = head_of(store)
    assert store.fsck(read_data=True).not_recorded == ""
    assert operations_after(store, before) == ["report"]
    noted = store.last_runs()["fsck"]
    assert noted.ok
    assert (noted.counts["errors"], noted.counts["packs"], noted.counts["read_packs"], noted.counts["snapshots"]) == (0, 2, 2, 2)
    assert noted.counts["read_bytes"] > 10_000
    copy = MemoryBackend()
    for name, data in contents(backend).items():
        copy.put(name, data)
    backend.delete([next(info.name for info in backend.list("snapshots/"))])
    assert not store.fsck().ok
    noted = store.last_runs()["fsck"]
    assert (noted.outcome, noted.counts["errors"], noted.counts["error.missing_object"]) == ("findings", 1, 1)
    assert noted.counts["read_packs"] == 0
    before = head_of(store)
    assert store.repair(other=open_store(copy)).ok
    assert operations_after(store, before) == ["report"]
    noted = store.last_runs()["fsck"]
    assert (noted.ok, noted.counts["repaired"], noted.counts["marked"]) == (True, 1, 0)
    other = open_store(backend)
    other.gc(AT_ONCE)
    assert store.last_runs() == other.last_runs()
    assert {run: each.entry for run, each in store.last_runs().items()} == {"fsck": noted.entry, "gc": noted.entry + 1}


def test_nothing_is_noted_by_who_only_looks(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "ck", create=True, cache_dir=tmp_path / "cache") as store:
        put_all(store, "job", [state(1)])
        store.gc(dry_run=True)
        assert store.fsck(record=False).not_recorded == ""
        with tsck.open(tmp_path / "ck", read_only=True, cache_dir=tmp_path / "cache") as looked:
            assert "read_only" in looked.fsck().not_recorded
            assert looked.last_runs() == {}
        assert head_of(store) == 1
        assert store.last_runs() == {}


def test_a_key_that_may_not_write_gets_the_result_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, data: object) -> None:
        raise PermissionDeniedError("403: this key may only read", object_id=name)

    backend, _ = begun(1)
    monkeypatch.setattr(backend, "create", refuse)
    report = open_store(backend).fsck(read_data=True)
    assert report.ok
    assert "403" in report.not_recorded
    assert "403" in open_store(backend).gc(AT_ONCE).not_recorded


@pytest.mark.parametrize(("missing", "has_cache"), [(1, True), (3, False)])
def test_nothing_is_appended_to_a_damaged_log(missing: int, has_cache: bool) -> None:
    backend, store = begun(1, 2, 3, 4)
    backend.delete([entry_name("log", missing)])
    before = contents(backend)
    checked = store if has_cache else open_store(backend)
    report = checked.fsck()
    assert not report.ok
    assert "damaged log" in report.not_recorded
    assert contents(backend) == before


@pytest.mark.parametrize(("in_place", "why"), [(True, "damaged log"), (False, "tsck accept-log")])
def test_nothing_is_appended_to_a_log_that_went_back(tmp_path: Path, in_place: bool, why: str) -> None:
    """Its newest entries are gone from the folder; or an older copy of the whole folder is in its place."""
    options: dict[str, Any] = {"no_sync": True, "state_dir": tmp_path / "state", "cache_dir": tmp_path / "cache"}
    place = tmp_path / "ck"
    with tsck.open(place, create=True, **options) as store:
        put_all(store, "job", [state(1)])
        shutil.copytree(place, tmp_path / "backup")
        put_all(store, "other", [state(2)])
    if in_place:
        for folder in place.iterdir():
            shutil.rmtree(folder) if folder.is_dir() else folder.unlink()
    else:
        place.rename(tmp_path / "aside")  # not deleted: another folder could get its inode
    shutil.copytree(tmp_path / "backup", place, dirs_exist_ok=True)
    with tsck.open(place, **options) as store:
        with pytest.warns(tsck.LogChangedWarning):
            head = head_of(store)
        assert why in store.fsck().not_recorded
        with pytest.raises(GcRefusedError):
            store.gc(AT_ONCE)
        assert head_of(store) == head == 1


def test_nothing_begins_a_log() -> None:
    backend = MemoryBackend()
    store = open_store(backend)
    leave_orphans(backend, state(1))
    assert store.fsck().not_recorded == "the log is empty"
    with pytest.raises(GcRefusedError, match="empty"):
        store.gc(AT_ONCE)
    assert head_of(store) == 0
    assert sizes(backend), "a second run does not take the log for one that was there"


def test_a_build_that_does_not_know_it_goes_on(forget_operation: Callable[[str], None]) -> None:
    backend, store = begun(1)
    store.fsck()
    forget_operation("report")
    old = open_store(backend)
    old.engine.log.append(lambda _: [Op({"op": "report", "critical": False, "other": "fields"})])
    assert old.last_runs() == {}
    old.tag("kept", "job")
    assert old.fsck().ok
    assert old.resolve("kept").step == 1


def test_a_build_that_does_not_know_the_end_of_a_run_folds_the_same(forget_operation: Callable[[str], None]) -> None:
    backend, store = begun(1)
    store.finish("job")
    known = store.engine.log.newest_view()
    forget_operation("finished")
    old = open_store(backend)
    view = old.engine.log.newest_view()
    assert [(name, view.branch(name)) for name in view.branches()] == [(name, known.branch(name)) for name in known.branches()]
    assert view.stop() is None
    old.tag("kept", "job")


def test_a_gc_loads_nothing_of_fsck() -> None:
    program = "import sys, tensorstore_ck.maintenance.recorded_runs; print(*(name for name in sys.modules if 'maintenance.' in name))"
    loaded = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert loaded.stdout.split() == ["tensorstore_ck.maintenance.recorded_runs"]

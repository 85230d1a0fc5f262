"""At every call into the host's cache, it fails, is locked, or was emptied: every operation succeeds, and says what the log says."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.protocol import Created, ObjectInfo
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.engine import opening
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.integrations.dcp import Writer
from tensorstore_ck.log.cache import CacheWarning, failover_table
from tensorstore_ck.session.save.staged_save import StagedSave
from tests.effort import effort, in_turns
from tests.group_of_one import group_of_one
from tests.log.cache.faultytable import CacheFaults, FaultyTable

pytestmark = pytest.mark.race
STEPS = (2, 3)
"""The steps that are saved under faults; step 1 exists before."""


def make_state(step: int) -> dict[str, object]:
    return {"weights": torch.arange(500, dtype=torch.float32) + step, "same": torch.arange(500), "step": step}


def put(folder: Path) -> None:
    with tsck.open(folder / "store") as store:
        store.checkout("job")
        for step in STEPS:
            assert store.put_snapshot(make_state(step), ref="job", step=step).step == step


def put_async(folder: Path) -> None:
    with tsck.open(folder / "store") as store:
        store.checkout("job")
        pending = [store.put_snapshot_async(make_state(step), ref="job", step=step) for step in STEPS]
        assert [each.wait().step for each in pending] == [*STEPS]


def put_async_in_turn(folder: Path) -> None:
    """Each is checked when it is submitted, as none is in progress."""
    with tsck.open(folder / "store") as store:
        store.checkout("job")
        for step in STEPS:
            assert store.put_snapshot_async(make_state(step), ref="job", step=step).wait().step == step


def save_by_checkpointer(folder: Path) -> None:
    with tsck.open(folder / "store") as store:
        state = make_state(1)
        with tsck.Checkpointer(store, state, ref="job", when=tsck.every_steps(1)) as checkpointer:
            assert checkpointer.resume() is not None
            for step in STEPS:
                state["step"] = step
                checkpointer.step(step)


def put_staged(folder: Path) -> None:
    with tsck.open(folder / "store", staging=folder / "stage") as store:
        store.checkout("job")
        pending = [store.put_snapshot_async(make_state(step), ref="job", step=step) for step in STEPS]
        assert [each.wait().step for each in pending] == [*STEPS]


def put_as_group(folder: Path) -> None:
    with tsck.open(folder / "store") as store:
        store.checkout("job")
        for step in STEPS:
            assert store.put_snapshot(make_state(step), ref="job", step=step, group=dist.group.WORLD).step == step


def put_by_dcp(folder: Path) -> None:
    writer = Writer(folder / "store", "job")
    for step in STEPS:
        dcp.save(make_state(step), storage_writer=writer, checkpoint_id=f"step-{step}", no_dist=True)
        assert writer.snapshot is not None
        assert writer.snapshot.step == step


def copy(folder: Path) -> None:
    with tsck.open(folder / "other", create=True) as other:
        for step in (1, *STEPS):
            other.put_snapshot(make_state(step), ref="job", step=step)
    tsck.open(folder / "copied", create=True).close()
    tsck.copy(folder / "other", folder / "copied", refs=["job"])
    with tsck.open(folder / "copied") as copied:
        assert [each.step for each in copied.log("job")] == [*STEPS[::-1], 1]


def forget_and_gc(folder: Path) -> None:
    with tsck.open(folder / "store") as store:
        for step in STEPS:
            store.put_snapshot(make_state(step), ref="side", step=step)
        (forgotten,) = store.forget("side")
        assert {each.step for each in forgotten.snapshots} == {*STEPS}
        report = store.gc(options=tsck.GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1.0))
        assert report.freed_bytes > 0
        assert list(store.branches()) == ["job"]
        store.tag("kept", "job")
        assert list(store.tags()) == ["kept"]
        store.migrate_tiers()
        look(store)


def look(store: tsck.Store) -> None:
    """What reports about the whole store, with one branch and one tag."""
    assert [each.ref for each in store.usage().refs] == ["job", "kept"]
    assert store.fsck().ok
    assert [each.step for each in store.log()] == [1]
    assert store.gc(dry_run=True).refused is None
    assert not store.apply_policies(dry_run=True).going
    assert [each.root for each in store.tags().values()] == [each.root for each in store.branches().values()]


SCENES: dict[str, tuple[Callable[[Path], None], bool]] = {
    "put": (put, True),
    "put_async": (put_async, True),
    "put_async in turn": (put_async_in_turn, True),
    "Checkpointer": (save_by_checkpointer, True),
    "put staged": (put_staged, True),
    "put as a group": (put_as_group, True),
    "put by DCP": (put_by_dcp, True),
    "copy": (copy, False),
    "forget, gc and tier": (forget_and_gc, False),
}
"""What is done, and whether it saves `STEPS` to the branch."""


FAULTS = ("fails", "is locked once", "stays locked")
CASES = [([*SCENES][scene], fault) for scene, fault in in_turns(range(len(SCENES)), FAULTS)]
CASES += [("put", "is locked once"), ("put", "stays locked"), ("put_async", "fails"), ("put staged", "fails")]


@contextmanager
def shared_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[CacheFaults]:
    faults, tables = CacheFaults(), dict[str, FaultyTable]()
    with monkeypatch.context() as patched:
        patched.setattr(opening, "open_table", lambda _, key, **__: tables.setdefault(key, FaultyTable(faults)))
        patched.setattr(failover_table, "_STUCK_SECONDS", math.inf)  # a scene may take longer than that
        yield faults


def play(
    folder: Path,
    scene: Callable[[Path], None],
    faults: CacheFaults,
    failing: range,
    *,
    is_busy: bool = False,
    emptied: Callable[[], object] | None = None,
) -> list[str]:
    """Runs it under these faults; the warnings that came."""
    folder.mkdir()
    with tsck.open(folder / "store", create=True) as store:
        store.put_snapshot(make_state(1), ref="job", step=1)
    faults.reset(failing, is_busy=is_busy, emptied=emptied)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        scene(folder)
    faults.failing = range(0)
    assert {each.category for each in caught} <= {CacheWarning}
    return [str(each.message) for each in caught]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "fault"), sorted(set(CASES)))
def test_whatever_the_cache_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, fault: str) -> None:
    scene, puts = SCENES[name]
    is_busy = fault != "fails"
    with group_of_one() if scene is put_as_group else nullcontext():
        with shared_cache(monkeypatch) as faults:
            assert not play(tmp_path / "counted", scene, faults, range(0), is_busy=is_busy)
        calls = faults.calls
        assert calls
        stride = effort(max(1, calls // 10), 1)
        for at in range(stride // 2 if fault == "is locked once" else 0, calls, stride):
            folder = tmp_path / str(at)
            with shared_cache(monkeypatch) as faults:
                failing = range(at, at + 1) if fault == "is locked once" else range(at, 1 << 30)
                told = play(folder, scene, faults, failing, is_busy=is_busy)
                assert bool(told) == (not is_busy and at < faults.calls)  # threads make other numbers of calls in each run
            with tsck.open(folder / "store", cache_dir=tmp_path / "own cache") as store:  # what the log says
                steps = [snapshot.step for snapshot in store.log("job")]
                assert steps == ([*STEPS[::-1], 1] if puts else [1])
                assert store.checkout("job")["step"] == steps[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENES)
def test_whenever_another_process_empties_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Once, or at every call from one on; and another one may have filled it again by then."""
    scene, puts = SCENES[name]
    with group_of_one() if scene is put_as_group else nullcontext():
        with shared_cache(monkeypatch) as faults:
            play(tmp_path / "counted", scene, faults, range(0), emptied=lambda: None)
        calls = faults.calls
        assert calls
        stride = effort(max(1, calls // 12), 1)
        for at, (is_once, is_filled) in in_turns(range(calls), [(True, False), (True, True), (False, True)]):
            if at % stride:
                continue
            folder = tmp_path / f"{at}-{is_once}-{is_filled}"

            def fill(folder: Path = folder) -> None:
                with tsck.open(folder / "store", read_only=True) as other:
                    other.branches()

            with shared_cache(monkeypatch) as faults:
                failing = range(at, at + 1) if is_once else range(at, 1 << 30, 7)
                told = play(folder, scene, faults, failing, emptied=fill if is_filled else lambda: None)
                assert not (told and is_once), told
            with tsck.open(folder / "store", cache_dir=tmp_path / "own cache") as store:
                assert [snapshot.step for snapshot in store.log("job")] == ([*STEPS[::-1], 1] if puts else [1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["put", "put_async"])
def test_where_warnings_are_errors_no_save_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    scene, _ = SCENES[name]
    with shared_cache(monkeypatch) as faults:
        play(tmp_path / "counted", scene, faults, range(0), is_busy=False)
    calls = faults.calls
    for at in range(0, calls, effort(max(1, calls // 10), 1)):
        folder = tmp_path / str(at)
        with shared_cache(monkeypatch) as faults:
            with tsck.open(folder / "store", create=True) as store:
                store.put_snapshot(make_state(1), ref="job", step=1)
            faults.reset(range(at, 1 << 30), is_busy=False)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                scene(folder)


def test_a_log_that_fails_once_behind_a_locked_cache_leaves_out_no_upload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry that says what is staged is there, and neither table has it: what is published is uploaded all the same."""
    failures = ["list"]
    create, listed = LocalBackend.create, LocalBackend.list

    def create_and_lock(self: LocalBackend, name: str, data: Buffer) -> Created:
        faults.reset(range(1 << 30), is_busy=True)
        return create(self, name, data)

    def fail_once(self: LocalBackend, prefix: str) -> Iterator[ObjectInfo]:
        if faults.is_busy and failures and prefix.startswith("log/"):
            failures.pop()
            raise BackendUnavailableError("the test's fault", object_id=prefix)
        return listed(self, prefix)

    with shared_cache(monkeypatch) as faults, tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot(make_state(1), ref="another", step=1)
        with monkeypatch.context() as patched, tsck.open(tmp_path / "store", staging=tmp_path / "stage") as staging:
            patched.setattr(StagedSave, "announce_soon", lambda _: None)  # as where the store did not answer
            patched.setattr(LocalBackend, "create", create_and_lock)
            patched.setattr(LocalBackend, "list", fail_once)
            staging.put_snapshot(make_state(2), ref="job", step=2)
    assert not failures
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "own cache") as store:
        assert store.checkout("job")["step"] == 2

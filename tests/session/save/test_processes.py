"""Real processes that end in every way with saves in flight, get signals to end, fork, and use no more than they may."""

import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import tensorstore_ck as tsck
from tensorstore_ck.common.threads import cpu_threads
from tests.effort import PATIENCE_SECONDS
from tests.session.save import worker
from tests.session.save.places import MIB, check, put_beside
from tests.session.save.worker import Started, heard

dist: Any = torch.distributed
pytestmark = pytest.mark.slow


def run(scene: Callable[..., None], folder: Path, *args: object) -> int:
    """Plays a scene in a process of its own; the exit code."""
    return Started(scene, folder, *args).end()


def steps_of(folder: Path) -> list[int | None]:
    """What the next process finds: restored and compared, each on top of the one before."""
    with tsck.open(folder / "store", cache_dir=folder / "next") as store:
        if "job" not in store.branches():
            return []
        snapshots = store.log("job")
        assert [snapshot.parent for snapshot in snapshots] == [*(snapshot.root for snapshot in snapshots[1:]), None]
        for snapshot in snapshots:
            assert snapshot.step is not None
            check(store, snapshot.step)
        return [snapshot.step for snapshot in reversed(snapshots)]


def stderr(folder: Path) -> str:
    return (folder / "stderr").read_text()


def await_heard(folder: Path, key: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not any(key in line for line in heard(folder)):
        assert time.monotonic() < deadline, stderr(folder)
        time.sleep(0.005)


# --- the end of a process with saves in flight ---------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "code"), [("returns", 0), ("raises", 1), ("exits", 3)])
def test_what_is_in_flight_is_finished(tmp_path: Path, how: str, code: int) -> None:
    assert run(worker.in_flight, tmp_path, how) == code, stderr(tmp_path)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert heard(tmp_path) == [{"published": step} for step in (1, 2, 3)]
    assert ("ZeroDivisionError: the training failed" in stderr(tmp_path)) == (how == "raises")
    assert "under way" not in stderr(tmp_path)


def test_what_cannot_be_finished_is_said(tmp_path: Path) -> None:
    assert run(worker.in_flight, tmp_path, "fails") == 0
    assert steps_of(tmp_path) == [2, 3]
    assert "saving job@1 failed" in stderr(tmp_path)
    assert "the process ends with saves in progress: job@3" in stderr(tmp_path)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize(("in_thread", "starts"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("has_saved", [True, False])
def test_saves_after_the_main_thread_has_ended(tmp_path: Path, has_saved: bool, in_thread: bool, starts: bool, is_staged: bool) -> None:
    assert run(worker.after_main, tmp_path, has_saved, in_thread, starts, is_staged) == 0, stderr(tmp_path)
    assert steps_of(tmp_path) == [*([1] if has_saved else []), 2, 3], stderr(tmp_path)
    assert "saves in progress" not in stderr(tmp_path)


def test_a_backend_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    assert run(worker.in_flight, tmp_path, "hangs") == 0
    assert steps_of(tmp_path) == []
    assert "the process ends with saves in progress: nothing was published; given up: job@1, job@2, job@3" in stderr(tmp_path)


# --- SIGKILL ------------------------------------------------------------------------------------------------------------

POINTS = [
    (prefix, after)
    for prefix in ("open packs/", "append", "close", "put parts/", "put snapshots/", "create log/")
    for after in (False, True)
]


@pytest.mark.race
def test_killed_at_each_point_and_gone_on_with(tmp_path: Path) -> None:
    """One job that is killed again and again: it never loses an acknowledged save, and always continues."""
    acknowledged, head = 0, 0
    for number, (prefix, after) in enumerate(POINTS):
        calls = (3 if prefix != "append" else 9) + number % 2
        assert run(worker.killed, tmp_path, prefix, calls, after) == -signal.SIGKILL, stderr(tmp_path)
        acknowledged = max((line["published"] for line in heard(tmp_path) if "published" in line), default=0)
        steps = steps_of(tmp_path)
        assert steps == list(range(1, len(steps) + 1))
        assert acknowledged <= len(steps) <= acknowledged + 1
        assert len(steps) > head, f"it did not go on after {prefix}"
        head = len(steps)
    assert not any("lost" in line for line in heard(tmp_path))
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        store.checkout("job")
        put_beside(store, head + 1).wait()
        assert store.fsck(read_data=True).ok
    assert steps_of(tmp_path)[-1] == head + 1


# --- preemption ---------------------------------------------------------------------------------------------------------


def test_a_loop_that_asks_saves_once_more_and_leaves(tmp_path: Path) -> None:
    process = Started(worker.preempted, tmp_path, PATIENCE_SECONDS)
    await_heard(tmp_path, "ready")
    os.kill(process.pid, signal.SIGTERM)
    assert process.end() == 0, stderr(tmp_path)
    said = heard(tmp_path)[-1]
    assert (said["safe"], said["dropped"]) == (said["last"], 0)
    assert steps_of(tmp_path)[-1] == said["last"]
    assert f"preempted: job@{said['last']} (" in stderr(tmp_path)


def test_a_loop_that_never_asks_ends_by_the_signal(tmp_path: Path) -> None:
    process = Started(worker.preempted_unawares, tmp_path, 0.4)
    await_heard(tmp_path, "ready")
    os.kill(process.pid, signal.SIGTERM)
    assert process.end() == -signal.SIGTERM, stderr(tmp_path)
    assert steps_of(tmp_path) == [1, 2, 3]
    assert "preempted: job@3 (" in stderr(tmp_path)


def test_a_helper_process_is_ended_by_the_signal_at_once(tmp_path: Path) -> None:
    assert run(worker.preempted_child, tmp_path) == 0, stderr(tmp_path)
    assert heard(tmp_path) == [{"helper": -signal.SIGTERM, "requested": False}]


# --- forks --------------------------------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.parametrize("at", ["append", "create log/"])
def test_a_child_that_is_forked_in_the_middle_of_a_save(tmp_path: Path, at: str) -> None:
    """It has a store to work with, the parent's saves are the parent's, and neither hangs."""
    assert run(worker.forked, tmp_path, at) == 0, stderr(tmp_path)
    waited, child, parent = heard(tmp_path)
    assert waited["waited"] != "WaitTimeoutError"
    assert "process from which this one was forked" in waited["message"]
    assert child["pending"] == 0
    assert child["restored"] == 1
    assert child["steps"] == [1]
    assert child["put"] == [10, 11]
    assert parent == {"child": 0, "parent": 2, "next": 3}
    assert steps_of(tmp_path) == [1, 2, 3]
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "next") as store:
        assert [found.step for found in store.log("child")] == [11, 10]
        check(store, 10, ref="child")


def test_data_loader_workers_that_are_forked_while_saves_are_in_flight(tmp_path: Path) -> None:
    assert run(worker.loading, tmp_path) == 0, stderr(tmp_path)
    (said,) = heard(tmp_path)
    assert said["total"] == 3 * sum(range(24))
    assert said["steps"] == steps_of(tmp_path) == [10 * epoch + number for epoch in range(3) for number in range(6)]


# --- ranks --------------------------------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_with_saves_in_flight(tmp_path: Path, victim: int) -> None:
    """The others learn which rank is gone, in bounded time, and continue with their handles."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "next").close()
    processes = [Started(worker.one_of_ranks, tmp_path, rank, 3, victim, server.port) for rank in range(3)]
    codes = [process.end() for process in processes]
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)], stderr(tmp_path)
    said = heard(tmp_path)
    assert {line["rank"] for line in said} == {0, 1, 2} - {victim}
    assert len({line["root"] for line in said}) == 1
    for line in said:
        for step in ("2", "3"):
            kind, text = line[step]
            assert kind == "SnapshotAbortedError"
            assert f"rank {victim}" in text
    assert steps_of(tmp_path) == [1, 4]


ENCODED_BYTES = 6 * MIB
"""What a thread has of a block of 4 MiB while it encodes it."""


# --- what is used -------------------------------------------------------------------------------------------------------


def test_resident_memory_stays_within_the_budget(tmp_path: Path) -> None:
    assert run(worker.memory, tmp_path) == 0, stderr(tmp_path)
    for said in heard(tmp_path):
        assert said["peak"] <= said["budget"] + 24 * MIB + (cpu_threads() + 1) * ENCODED_BYTES, said


def test_many_small_saves_leave_nothing_behind(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    folder = tmp_path if not shared.is_dir() else shared / f"tsck-{os.getpid()}"
    puts = 500
    try:
        assert run(worker.many, folder, puts) == 0, stderr(folder)
        early, late, last = heard(folder)
    finally:
        if folder != tmp_path:
            shutil.rmtree(folder, ignore_errors=True)
    assert late["fds"] <= early["fds"]
    assert late["resident"] - early["resident"] < 24 * MIB
    assert puts - 2 * (puts // 100) <= last["published"] <= puts

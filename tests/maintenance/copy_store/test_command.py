"""Pace, progress, pieces that run elsewhere, and the command."""

import json
import threading
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck import ConflictError, DamageError, InvalidOptionError, NotFoundError
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.cli.app import Program
from tensorstore_ck.cli.cmd_copy import copy as copy_command
from tensorstore_ck.cli.options import byte_rate
from tensorstore_ck.common import threads
from tensorstore_ck.common.executor import Executor, LocalThreads
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.engine.opening import init_store
from tensorstore_ck.log import Op
from tensorstore_ck.maintenance.copy_store import Pace, RateLimit, blocks, copy, copy_refs
from tests.effort import PATIENCE_SECONDS
from tests.maintenance.copy_store.places import Elsewhere, Watched, assert_same, empty
from tests.maintenance.fsck.stores import build, reopen


class FakeTime:
    """Time passes only by waiting."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def wait(self, failed: Flag, seconds: float) -> None:
        with self._lock:
            self.now += seconds


def test_rates_and_rate_limits() -> None:
    rates = {"100MB": 1e8, "1.5GiB/s": 1.5 * (1 << 30), "500k": 5e5, "12": 12.0}
    assert {text: byte_rate(text) for text in rates} == rates
    for text in ("0", "fast", "5XB"):
        with pytest.raises(click.BadParameter, match="is not a rate"):
            byte_rate(text)
    source, target = reopen(build()), reopen(empty())
    for rate in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidOptionError, match="rate limit"):
            copy(source, target, rate_limit=rate)
    with pytest.raises(InvalidOptionError, match="this process only"):
        copy_refs(source.engine, target.engine, pace=Pace.limited(1e9), executor=Elsewhere())
    time = FakeTime()
    limit = RateLimit(100.0, clock=time.clock)
    assert limit.take(50) == 0.5
    time.now = 10.0
    assert limit.take(25) == 0  # saved while nothing was taken: as much as was taken last
    assert limit.take(1000) == 9.75
    assert limit.take(0) == 9.75
    time.now = 20.0
    assert limit.take(0) == 0


@pytest.mark.parametrize("limited", ["reads", "writes"])
def test_both_directions_are_limited(limited: str) -> None:
    time = FakeTime()
    slow, fast = RateLimit(1000.0, clock=time.clock), RateLimit(1e15, clock=time.clock)
    pace = Pace(*((slow, fast) if limited == "reads" else (fast, slow)), time.wait)
    report = copy_refs(reopen(build()).engine, reopen(empty()).engine, pace=pace)
    assert time.now >= 0.95 * (report.read_bytes if limited == "reads" else 4 * 6000) / 1000


def test_a_slow_copy_ends_with_its_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or with Ctrl-C: in the thread that called, and while the others wait."""
    source_backend, target = empty(), reopen(empty())
    with reopen(source_backend) as store:
        store.put_snapshot({str(number): torch.full((2000,), float(number)) for number in range(20)}, ref="job")
    waiting = threading.Semaphore(0)
    took = []

    def wait(failed: Flag, seconds: float) -> None:
        if threading.current_thread() is threading.main_thread():
            assert waiting.acquire(timeout=PATIENCE_SECONDS)  # another thread waits by now
            raise KeyboardInterrupt
        waiting.release()
        took.append(failed.wait(PATIENCE_SECONDS))  # the error ends it

    monkeypatch.setattr(blocks, "cpu_threads", lambda: 3)
    pace = Pace(RateLimit(100.0), RateLimit(100.0), wait)
    source = Watched(source_backend)
    with pytest.raises(KeyboardInterrupt):
        copy_refs(reopen(source).engine, target.engine, pace=pace)
    assert took
    assert all(took)
    assert source.bytes_read == 0, "nobody went on"
    assert not [thread for thread in threading.enumerate() if thread.name == "tsck"]


def test_ctrl_c_while_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that called has nothing left to do, and waits for them."""
    failed, begun = Flag(), threading.Event()
    took: list[bool] = []

    class Interrupted(threads.Helper):
        is_interrupted = False

        def end(self) -> None:
            if not self.is_interrupted:
                self.is_interrupted = True
                raise KeyboardInterrupt
            super().end()

    def work(task: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(PATIENCE_SECONDS)
        else:
            begun.set()
            took.append(failed.wait(PATIENCE_SECONDS))

    monkeypatch.setattr(threads, "Helper", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        for_each(range(2), work, 2, failed=failed)
    assert took == [True]


def test_progress() -> None:
    source = reopen(build())
    seen: list[tuple[int, int]] = []
    copy(source, reopen(empty()), progress=lambda done, total: seen.append((done, total)))
    total = sum(snap.logical_bytes for snap in {snap.root: snap for snap in source.log()}.values())
    assert {at for _, at in seen} == {total}
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("executor", [LocalThreads(3), Elsewhere()])
def test_pieces_run_anywhere(executor: Executor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blocks, "PIECE_BYTES", 5_000)
    build(LocalBackend(str(tmp_path / "source")))
    init_store(LocalBackend(str(tmp_path / "target")))
    places = (tmp_path / "source", tmp_path / "target")
    with tsck.open(places[0], cache_dir=tmp_path / "cache") as source, tsck.open(places[1], cache_dir=tmp_path / "cache") as target:
        copy_refs(source.engine, target.engine, executor=executor)
        assert_same(source, target)


def test_runs_hold_neighbours_and_those_of_a_slow_copy_are_short() -> None:
    rows = np.zeros(5, blocks.BLOCK_DTYPE)
    rows["pack"] = [0, 0, 0, 1, 1]
    rows["offset"] = [64, 164, 1 << 20, 64, (4 << 20) + 60]
    rows["stored"] = [100, 200, 50, 4 << 20, 10]
    assert [run["offset"].tolist() for run in blocks._runs(rows, blocks.RUN_BYTES)] == [[64, 164], [1 << 20], [64], [(4 << 20) + 60]]
    assert [len(run) for run in blocks._runs(rows, 1)] == [1] * 5


def tsck_copy(*arguments: str) -> tuple[int, Any]:
    program = Program(commands=[copy_command])
    result = CliRunner().invoke(program, ["copy", *arguments, "--json"], catch_exceptions=False)
    return result.exit_code, json.loads(result.stdout)


def test_command(tmp_path: Path) -> None:
    build(LocalBackend(str(tmp_path / "source")))
    init_store(LocalBackend(str(tmp_path / "target")))
    places = (str(tmp_path / "source"), str(tmp_path / "target"), "--cache-dir", str(tmp_path / "cache"))
    code, document = tsck_copy(*places, "--ref", "runs/*", "--rate-limit", "100MB")
    assert (code, document["ok"], document["snapshots"]) == (0, True, 4)
    code, document = tsck_copy(*places)
    assert (code, document["snapshots"], document["blocks"], [ref["outcome"] for ref in document["refs"]]) == (
        0,
        0,
        0,
        ["there", "there", "copied"],
    )
    with tsck.open(tmp_path / "target", cache_dir=tmp_path / "cache") as target:
        target.untag("paper")
        target.tag("paper", "runs/a@1")
    code, document = tsck_copy(*places)
    assert (code, document["ok"], document["refs"][2]["error"]["kind"]) == (ConflictError.exit_code, False, "conflict")
    code, document = tsck_copy(*places, "--ref", "nothing")
    assert (code, document["error"]["kind"]) == (NotFoundError.exit_code, "not_found")
    text = CliRunner().invoke(copy_command, places, catch_exceptions=False)
    assert text.exit_code == ConflictError.exit_code
    assert "tag 'paper' was not copied" in text.stdout


def test_a_head_that_is_marked_damaged(tmp_path: Path) -> None:
    build(LocalBackend(str(tmp_path / "source")))
    init_store(LocalBackend(str(tmp_path / "target")))
    places = (str(tmp_path / "source"), str(tmp_path / "target"), "--cache-dir", str(tmp_path / "cache"))
    with tsck.open(tmp_path / "source", cache_dir=tmp_path / "cache") as source:
        root, before = source.resolve("runs/a").root, source.resolve("runs/a~1").root
        source.engine.log.append(lambda view: [Op.mark(bytes.fromhex(root), "damaged", "by fsck")])  # type: ignore[arg-type]
        for snapshots in (2, 0):
            code, document = tsck_copy(*places, "--ref", "runs/a")
            (ref,) = document["refs"]
            assert (code, document["ok"], ref["outcome"], ref["error"]["kind"]) == (DamageError.exit_code, False, "behind", "damage")
            assert (ref["root"], ref["snapshots"], ref["error"]["object"]) == (before, snapshots, root)
        text = CliRunner().invoke(copy_command, places, catch_exceptions=False)
        assert (text.exit_code, "behind" in text.stdout) == (DamageError.exit_code, True)
        assert f"`tsck reset runs/a runs/a~1 -s {source.url}`" in text.stdout
        source.reset("runs/a", "runs/a~1")
    code, document = tsck_copy(*places)
    assert (code, document["ok"], {ref["outcome"] for ref in document["refs"]}) == (0, True, {"there"})

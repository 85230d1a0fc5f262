"""Pace, progress, pieces that run elsewhere, and the command."""

import json
import pickle
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck import ConflictError, InvalidOptionError, NotFoundError
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.cli.app import Program
from tensorstore_ck.cli.copying import byte_rate
from tensorstore_ck.cli.copying import copy as copy_command
from tensorstore_ck.copying import Pace, RateLimit, blocks, copy, copy_refs
from tensorstore_ck.executor import LocalThreads
from tensorstore_ck.opening import init_store
from tests.copying.places import assert_same, empty, open_over
from tests.fsck.stores import build, reopen

# --- pace, progress, executor ---------------------------------------------------------------------------------------------


class FakeTime:
    """Time passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 0.0
        self._lock = threading.Lock()

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


def test_rate_limit() -> None:
    time = FakeTime()
    limit = RateLimit(100.0, clock=time.clock, sleep=time.sleep)
    limit.take(50)
    assert time.now == 0.5
    time.now = 10.0
    limit.take(100)  # saved while nothing was taken
    assert time.now == 10.0
    limit.take(1000)
    assert time.now == 20.0
    limit.take(0)
    assert time.now == 20.0


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_no_rate(rate: float) -> None:
    with pytest.raises(InvalidOptionError, match="rate limit"):
        copy(reopen(build()), open_over(empty()), rate_limit_bytes_per_second=rate)


@pytest.mark.parametrize("limited", ["reads", "writes"])
def test_both_directions_are_limited(limited: str) -> None:
    time = FakeTime()
    slow, fast = RateLimit(1000.0, clock=time.clock, sleep=time.sleep), RateLimit(1e15, clock=time.clock, sleep=time.sleep)
    pace = Pace(slow, fast) if limited == "reads" else Pace(fast, slow)
    report = copy_refs(reopen(build())._engine, open_over(empty())._engine, pace=pace)
    assert time.now >= 0.95 * (report.read_bytes if limited == "reads" else 4 * 6000) / 1000


def test_progress() -> None:
    source = reopen(build())
    seen: list[tuple[int, int]] = []
    copy(source, open_over(empty()), progress=lambda done, total: seen.append((done, total)))
    total = sum(snap.logical_bytes for snap in {snap.root: snap for snap in source.log()}.values())
    assert {at for _, at in seen} == {total}
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


class Elsewhere(LocalThreads):
    """Like a cluster: what travels is pickled, and a piece may run twice."""

    is_remote = True

    def run(self, work: Any, pieces: Iterable[Any]) -> Any:
        for piece in pieces:
            for _ in range(2):
                pickled = pickle.dumps((work, piece))
                carried_work, carried_piece = pickle.loads(pickled)
                result = carried_work(carried_piece)
            yield pickle.loads(pickle.dumps(result))


@pytest.mark.parametrize("executor", [LocalThreads(3), Elsewhere(1)])
def test_pieces_run_anywhere(executor: LocalThreads, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(blocks, "PIECE_BYTES", 5_000)
    build(LocalBackend(str(tmp_path / "source")))
    init_store(LocalBackend(str(tmp_path / "target")))
    places = (tmp_path / "source", tmp_path / "target")
    with tsck.open(places[0], cache_dir=tmp_path / "cache") as source, tsck.open(places[1], cache_dir=tmp_path / "cache") as target:
        copy_refs(source._engine, target._engine, executor=executor)
        assert_same(source, target)


def test_no_rate_limit_elsewhere() -> None:
    with pytest.raises(InvalidOptionError, match="this process only"):
        copy_refs(reopen(build())._engine, open_over(empty())._engine, pace=Pace.limited(1e9), executor=Elsewhere(1))


def test_runs_hold_neighbours() -> None:
    rows = np.zeros(5, blocks.BLOCK_DTYPE)
    rows["pack"] = [0, 0, 0, 1, 1]
    rows["offset"] = [64, 164, 1 << 20, 64, (4 << 20) + 60]
    rows["stored"] = [100, 200, 50, 4 << 20, 10]
    assert [run["offset"].tolist() for run in blocks._runs(rows)] == [[64, 164], [1 << 20], [64], [(4 << 20) + 60]]


# --- the command ----------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("text", "rate"),
    [("100MB", 1e8), ("1.5GiB/s", 1.5 * (1 << 30)), ("500k", 5e5), ("12", 12.0), ("0", None), ("fast", None), ("5XB", None)],
)
def test_rates(text: str, rate: float | None) -> None:
    if rate is None:
        with pytest.raises(click.BadParameter, match="is no rate"):
            byte_rate(text)
    else:
        assert byte_rate(text) == rate

"""Executors run every piece, wherever a worker dies."""

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.common.executor import AHEAD, DaskCluster, Executor, LocalThreads
from tensorstore_ck.errors import BackendUnavailableError

distributed = pytest.importorskip("distributed")


def square(number: int) -> int:
    return number * number


def fail_at_three(number: int) -> int:
    if number == 3:
        raise ValueError("three")
    return number


def die_once(piece: tuple[int, str]) -> int:
    """Kills its worker the first time that piece 5 is run anywhere."""
    number, folder = piece
    if number == 5:
        try:
            os.close(os.open(f"{folder}/died", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return number
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def threads_of_dask() -> Iterator[Any]:
    """In this process: it starts quickly."""
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as cluster:
        yield cluster


@pytest.fixture(params=["threads", "dask"])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "threads":
        yield LocalThreads(3)
    else:
        with DaskCluster(request.getfixturevalue("threads_of_dask").scheduler_address) as dask:
            yield dask


def test_every_piece_runs_and_the_first_error_is_raised(executor: Executor) -> None:
    assert sorted(executor.run(square, range(100))) == [number * number for number in range(100)]
    assert list(executor.run(square, [])) == []
    with pytest.raises(ValueError, match="three"):
        list(executor.run(fail_at_three, range(1000)))


def test_pieces_are_drawn_as_they_are_needed() -> None:
    drawn = itertools.count()
    results = LocalThreads(2).run(square, (next(drawn) for _ in range(1000)))
    next(results)
    assert next(drawn) <= 2 * AHEAD + 1
    results.close()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.race
def test_a_worker_dies(cluster: Any, tmp_path: Path) -> None:
    with DaskCluster(cluster.scheduler_address) as dask:
        found = list(dask.run(die_once, ((number, str(tmp_path)) for number in range(20))))
    assert sorted(found) == list(range(20))
    assert (tmp_path / "died").exists()


def test_no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.common.executor.CONNECT_SECONDS", 0.1)
    with pytest.raises(BackendUnavailableError, match="no Dask scheduler"):
        DaskCluster("tcp://127.0.0.1:9")

"""fsck and copy on the workers of a real Dask cluster."""

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensorstore_ck.backend.picklable import PicklableBackend
from tensorstore_ck.common.executor import DaskCluster, Piece, Result
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.maintenance.copy_store import copy_refs
from tensorstore_ck.maintenance.fsck import FsckOptions, run_fsck
from tests.cli.conftest import Tsck

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50) as cluster:
        yield cluster


def test_fsck(history: Tsck, cluster: Any) -> None:
    here = history("fsck", "--read-data", "--json").json["report"]
    there = history("fsck", "--read-data", "--dask", cluster.scheduler_address, "--json").json["report"]
    assert (there["data_bytes"], there["blocks"], there["read_packs"]) == (here["data_bytes"], here["blocks"], here["read_packs"])


def test_copy(history: Tsck, cluster: Any) -> None:
    assert history("init", "other").code == 0
    copied = history("copy", "ck", "other", "--dask", cluster.scheduler_address, "--json")
    assert copied.json["snapshots"] == 2
    assert history("fsck", "--read-data", store="other").code == 0
    assert [row["root"] for row in history("log", "--json", store="other").json] == [row["root"] for row in history("log", "--json").json]


def test_no_cluster(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.common.executor.CONNECT_SECONDS", 0.1)
    result = history("fsck", "--read-data", "--dask", "tcp://127.0.0.1:9")
    assert "no Dask scheduler" in result.err
    assert result.code == 13


class Killing(DaskCluster):
    """Kills a worker as soon as it has a first result."""

    def __init__(self, cluster: Any) -> None:
        super().__init__(cluster.scheduler_address)
        self.killed = 0
        self._workers = cluster.workers

    def run(self, work: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
        for result in super().run(work, pieces):
            for pid in () if self.killed else [worker.pid for worker in self._workers.values()]:
                with suppress(ProcessLookupError, TypeError):  # one that was killed before, or is not there again yet
                    os.kill(pid, signal.SIGKILL)
                    self.killed = pid
                    break
            yield result


@pytest.mark.slow
@pytest.mark.race
def test_a_worker_dies(history: Tsck, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {str(number): torch.randn(50_000, generator=torch.Generator().manual_seed(number)) for number in range(40)}
    save_file(tensors, tmp_path / "large.safetensors")
    history("put", "large.safetensors", "--ref", "runs/large")
    assert history("init", "other").code == 0
    monkeypatch.setattr("tensorstore_ck.maintenance.copy_store.blocks.PIECE_BYTES", 200_000)
    monkeypatch.setattr("tensorstore_ck.maintenance.fsck.check_data.PIECE_BYTES", 200_000)
    with (
        closing(open_engine("ck", cache_dir=tmp_path / "c1")) as source,
        closing(open_engine("other", cache_dir=tmp_path / "c2")) as target,
    ):
        source.backend, target.backend = PicklableBackend("ck"), PicklableBackend("other")
        with Killing(cluster) as executor:
            assert copy_refs(source, target, executor=executor).ok
            assert executor.killed
        with Killing(cluster) as executor:
            report = run_fsck(target, FsckOptions(read_data=True), executor=executor)
            assert report.ok
            assert executor.killed
            assert report.data_bytes == run_fsck(target, FsckOptions(read_data=True)).data_bytes
    assert history("fsck", "--read-data", store="other").code == 0

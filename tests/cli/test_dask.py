"""fsck and copy on the workers of a real Dask cluster."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cli.conftest import Tsck

distributed = pytest.importorskip("distributed")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", silence_logs=50
    ) as cluster:
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

"""fsck, copy, recode and gc on the workers of a real Dask cluster."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck_store
from tensorstore_ck.errors import InvalidOptionError
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


@pytest.fixture
def two_runs(tsck: Tsck) -> Tsck:
    """`tsck` on a store of one pack with raw blocks of two branches."""
    generator = torch.Generator().manual_seed(1)
    state = {name: torch.randn(50_000, generator=generator) for name in ("kept", "dropped")}
    with tsck_store.open("ck", create=True, cache_dir="cache") as store:
        store.put_snapshot(state, ref="both", codec="raw")
        store.put_snapshot({"kept": state["kept"]}, ref="kept")
    assert tsck("forget", "both").code == 0
    return tsck


def packs_written_by(cluster: Any, tsck: Tsck, *args: str) -> int:
    """New packs of a command whose process may write none, and read no block."""
    before = set(Path("ck/packs").rglob("*"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorstore_ck.gc.compact.PackWriter", None)
        patch.setattr("tensorstore_ck.gc.recode_or_move.read_blocks", None)
        assert tsck(*args, "--dask", cluster.scheduler_address).code == 0
    assert tsck("fsck", "--read-data").code == 0
    return sum(path.is_file() for path in set(Path("ck/packs").rglob("*")) - before)


def test_recode(two_runs: Tsck, cluster: Any) -> None:
    assert packs_written_by(cluster, two_runs, "recode", "kept") == 1


def test_gc(two_runs: Tsck, cluster: Any) -> None:
    now = ("--min-age", "0s", "--undo-window", "0s", "--max-delete", "100%", "--compact-below", "90%")
    assert packs_written_by(cluster, two_runs, "gc", *now) == 1


@pytest.mark.parametrize("command", ["gc", "gc --dry-run", "recode --all"])
def test_a_rate_limit_holds_for_no_cluster(history: Tsck, cluster: Any, command: str) -> None:
    result = history(*command.split(), "--rate-limit", "1MB", "--dask", cluster.scheduler_address)
    assert (result.code, "this process only" in result.err) == (InvalidOptionError.exit_code, True)


def test_no_cluster(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.common.executor.CONNECT_SECONDS", 0.1)
    result = history("fsck", "--read-data", "--dask", "tcp://127.0.0.1:9")
    assert "no Dask scheduler" in result.err
    assert result.code == 13

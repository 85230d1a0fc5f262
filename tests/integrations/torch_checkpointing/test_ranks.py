"""A `CheckpointManager` on two ranks: what is spread, what is equal, what is each rank's own; on other numbers of ranks; after a kill."""

from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.rank_runs import ends, run_ranks
from tests.integrations.torch_checkpointing.rank_job import REF

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

JOB = "tests.integrations.torch_checkpointing.rank_job"
WEIGHT = [[float(row * 4 + column) + 1 for column in range(4)] for row in range(6)]


def assert_shared(items: dict[str, Any]) -> None:
    assert items["model"]["weight"] == WEIGHT
    assert items["model"]["bias"] == [1.0] * 4
    assert items["optimizer"] == {"state": {"0": {"exp_avg": [[2 * each for each in row] for row in WEIGHT]}}, "groups": [{"lr": 0.1}]}
    assert items["step"] == 1


@pytest.mark.parametrize("kind", effort(["sync"], ["async", "sync"]))
def test_each_rank_gets_its_own_and_what_is_common(tmp_path: Path, kind: str) -> None:
    run_ranks(JOB, tmp_path, "save", kind)
    loaded = ends(run_ranks(JOB, tmp_path, "load"), "items")
    assert len(loaded) == 2
    for rank, said in enumerate(loaded):
        assert_shared(said["items"])
        assert said["items"]["model"]["bn"] == {"mean": [float(rank)] * 3, "batches": rank}
        assert said["items"]["rng"] == [rank + 7] * 2
        assert said["items"].get("config") == ({"name": "of the first"} if rank == 0 else None)
    if kind == "sync":
        refused = ends(run_ranks(JOB, tmp_path, "load-what-is-missing", "config"), "refused")
        assert "no item 'config'" in refused[-1]["refused"]


def test_other_numbers_of_ranks(tmp_path: Path) -> None:
    run_ranks(JOB, tmp_path, "save")
    alone = ends(run_ranks(JOB, tmp_path, "load", ranks=1), "items")
    assert_shared(alone[0]["items"])
    assert alone[0]["items"]["rng"] == [7, 7]
    more = ends(run_ranks(JOB, tmp_path, "load", "shared", ranks=3), "items")
    assert len(more) == 3
    for said in more:
        assert_shared(said["items"])
    refused = ends(run_ranks(JOB, tmp_path, "load-what-is-missing", ranks=3), "refused")
    assert len(refused) == 3
    assert all("rank 2 has none" in each["refused"] for each in refused if each["rank"] == 2)
    with tsck.open(tmp_path / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert [snapshot.step for snapshot in store.log(REF)] == [2, 1]


@pytest.mark.race
def test_a_killed_rank(tmp_path: Path) -> None:
    """The last whole checkpoint is loaded, and the job goes on after it."""
    run_ranks(JOB, tmp_path, "loop", kill=(1, 3))
    said = run_ranks(JOB, tmp_path, "loop")
    began = {each["began"] for each in said if "began" in each}
    assert began <= {2, 3}
    assert len(began) == 1
    with tsck.open(tmp_path / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert [snapshot.step for snapshot in store.log(REF)] == [6, 5, 4, 3, 2, 1]


def test_what_one_rank_cannot_save_is_an_error_on_all(tmp_path: Path) -> None:
    """The item `b` has a resharder: ranks say that it is equal on all of them."""
    said = ends(run_ranks(JOB, tmp_path, "refused", "sync"), "refused")
    expected = [(rank, name) for rank in (0, 1) for name in ("key", "shared", "value")]
    assert sorted((each["rank"], each["refused"]) for each in said) == expected
    assert all("rank 1" in each["message"] or each["rank"] == 1 for each in said)

"""An `Accelerator` on two ranks: one is killed with -9, and the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.accelerate import runs
from tests.integrations.rank_runs import ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(900)]


JOB = "tests.integrations.accelerate.rank_job"
EVERY = [("ddp", 0), ("ddp", 1), ("fsdp", 1)]


@pytest.mark.parametrize(("kind", "rank"), effort(EVERY[1:], EVERY))
def test_a_killed_rank(tmp_path: Path, kind: str, rank: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = ends(run_ranks(JOB, whole, kind))
    assert len(expected) == 2
    run_ranks(JOB, cut, kind, kill=(rank, 8))
    resumed = ends(run_ranks(JOB, cut, kind, "newest"))
    for mine, full in zip(resumed, expected, strict=True):
        done = len(full["losses"]) - len(mine["losses"])
        assert 3 <= done <= 6
        assert mine["batches"] == full["batches"][done:]
        assert mine["losses"] == full["losses"][done:]
        assert [mine[name] for name in ("weights", "average", "drawn")] == [full[name] for name in ("weights", "average", "drawn")]


def test_fewer_ranks(tmp_path: Path) -> None:
    """The same weights, and the same number of saves; other generators, of which a warning tells."""
    run_ranks(JOB, tmp_path, "fsdp")
    with tsck.open(tmp_path / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        saved = {name: tensor.tolist() for name, tensor in store.checkout(f"{runs.REF}@3")["model"].items()}
    alone = run_ranks(JOB, tmp_path, "ddp", f"{runs.REF}@3", ranks=1)
    assert [each["loaded"] for each in alone if "loaded" in each] == [saved]
    assert len(ends(alone)) == 1

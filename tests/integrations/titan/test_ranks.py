"""torchtitan on two ranks: one is killed with -9, and the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan cannot be installed with the pinned fsspec: run `make test-apart`")

from tests.effort import effort
from tests.integrations.rank_runs import ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(1800)]

JOB = "tests.integrations.titan.rank_job"
EVERY = [("fsdp", 1, 7), ("fsdp", 0, 9), ("replicas", 1, 4)]


@pytest.mark.parametrize(("layout", "rank", "step"), effort(EVERY[:1], EVERY))
def test_a_killed_rank(tmp_path: Path, layout: str, rank: int, step: int) -> None:
    expected = ends(run_ranks(JOB, tmp_path / "whole", layout))
    assert len(expected) == 2
    run_ranks(JOB, tmp_path / "cut", layout, kill=(rank, step))
    for mine, full in zip(ends(run_ranks(JOB, tmp_path / "cut", layout)), expected, strict=True):
        done = len(full["losses"]) - len(mine["losses"])
        assert 0 < done <= 9
        assert mine["batches"] == full["batches"][done:]
        assert mine["losses"] == full["losses"][done:]
        assert (mine["digests"], mine["drawn"]) == (full["digests"], full["drawn"])

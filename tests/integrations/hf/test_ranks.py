"""transformers' Trainer on two ranks: one is killed with -9, and the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.hf.runs import STEPS
from tests.integrations.rank_runs import ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOB = "tests.integrations.hf.rank_job"
REF = "runs/ranks"


@pytest.mark.parametrize("rank", effort([0], [0, 1]))
def test_a_killed_rank(tmp_path: Path, rank: int) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = ends(run_ranks(JOB, whole, REF))
    assert len(expected) == 2
    run_ranks(JOB, cut, REF, kill=(rank, 7))
    resumed = run_ranks(JOB, cut, REF, "True")
    assert ends(resumed) == expected
    with tsck.open(cut / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert store.resolve(REF).step == STEPS
        report = tsck.export_snapshot(store, REF, tmp_path / "model", format="hf")
        assert report.notes[0].startswith("tried: GPT2LMHeadModel.from_pretrained loads it, with every weight")

"""transformers' Trainer on two ranks: one is killed with -9, and the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tests.integrations.hf.runs import STEPS
from tests.integrations.rank_runs import ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(900)]
JOB = "tests.integrations.hf.rank_job"
REF = "runs/ranks"


@pytest.mark.parametrize(("kind", "rank", "tensors"), [("ddp", 0, "Parameter"), ("fsdp2", 1, "DTensor")])
def test_a_killed_rank(tmp_path: Path, kind: str, rank: int, tensors: str) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = ends(run_ranks(JOB, whole, REF, kind))
    assert [each["kind"] for each in expected] == [tensors, tensors]
    run_ranks(JOB, cut, REF, kind, kill=(rank, 7))
    assert ends(run_ranks(JOB, cut, REF, kind, "True")) == expected
    with tsck.open(cut / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert store.resolve(REF).step == STEPS
        report = tsck.export_snapshot(store, REF, tmp_path / "model", format="hf")
        assert report.notes[0].startswith("tried: GPT2LMHeadModel.from_pretrained loads it, with every weight")
    if kind == "fsdp2":
        (alone,) = ends(run_ranks(JOB, cut, REF, "ddp", "True", ranks=1))
        assert alone["kind"] == "Parameter"
        assert [alone[name] for name in ("weights", "moments", "losses")] == [
            expected[0][name] for name in ("weights", "moments", "losses")
        ]

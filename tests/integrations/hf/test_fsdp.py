"""transformers' Trainer with FSDP2 on two ranks: one is killed with -9, and the resume is exact; on one rank the state is equal."""

from pathlib import Path

import pytest

from tests.integrations.rank_runs import ends, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
JOB = "tests.integrations.hf.fsdp_job"
REF = "runs/sharded"


def test_a_killed_rank_of_fsdp(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    expected = ends(run_ranks(JOB, whole, REF))
    assert [each["kind"] for each in expected] == ["DTensor", "DTensor"]
    run_ranks(JOB, cut, REF, kill=(1, 7))
    assert ends(run_ranks(JOB, cut, REF, "True")) == expected
    (alone,) = ends(run_ranks(JOB, cut, REF, "True", ranks=1))
    assert alone["kind"] == "Parameter"
    assert {name: alone[name] for name in ("weights", "moments", "losses")} == {
        name: expected[0][name] for name in ("weights", "moments", "losses")
    }

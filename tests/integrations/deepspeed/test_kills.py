"""A rank is killed with -9 at calls of the backend in a save: the resumed job ends as one that nothing disturbed."""

from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

from tests.effort import effort
from tests.integrations.rank_runs import check_kills

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(3600)]

JOB = "tests.integrations.deepspeed.kills_job"

WITH_SCALE = ["2,fp16,ep_size=2", "1,fp16,stages=2"]
"""Experts, and a pipeline, with a loss scale that changes every other step."""


@pytest.mark.parametrize("kind", effort(WITH_SCALE[:1], ["2,bf16", "3,bf16", *WITH_SCALE]))
def test_a_rank_dies_in_a_save(tmp_path: Path, kind: str) -> None:
    check_kills(JOB, tmp_path, kind, "losses", {2, 4})


@pytest.mark.parametrize("kind", effort(["2,bf16"], ["2,bf16", "3,bf16"]))
@pytest.mark.parametrize(("trainer", "saved_after"), [("transformers", {5, 9}), ("accelerate", {4, 7})])
def test_a_rank_dies_in_a_save_of_a_trainer(tmp_path: Path, trainer: str, saved_after: set[int], kind: str) -> None:
    check_kills(JOB, tmp_path, f"{trainer}:{kind}", "losses", saved_after)

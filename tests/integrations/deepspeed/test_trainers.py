"""transformers' Trainer and accelerate with DeepSpeed: a resume is exact; other stages and numbers of ranks get equal state.

Stage 3 is in processes of its own, as in test_stages.
"""

from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

from tests.effort import effort
from tests.integrations.rank_runs import Said, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = "tests.integrations.deepspeed.trainers_job"
BELOW = effort(["2,bf16", "1,fp32"], ["1,bf16", "2,bf16", "1,fp32", "2,fp32"])
STAGE_3 = effort(["3,bf16"], ["3,bf16", "3,fp32"])
DUMMY = "2,bf16,dummy=true"


def trained(trainer: str, folder: Path, below: list[str]) -> list[Said]:
    said = [each for kinds in (below, STAGE_3) for each in run_ranks(JOB, folder, trainer, "train", *kinds)]
    assert len(said) == 2 * len(below + STAGE_3)
    return said


def assert_other_layouts_get_equal_state(trainer: str, folder: Path, step: int) -> None:
    """One rank and another stage, of what two ranks have saved; all kinds in `make soak`."""
    for kinds in effort([["1,bf16"]], [BELOW, STAGE_3]):
        said = run_ranks(JOB, folder, trainer, "load", *kinds, ranks=1)
        assert {each["ref"] for each in said} >= {"runs/bf16-2", "runs/bf16-3"}
        for each in said:
            assert (each["differ"], each["step"]) == ([], step), each
            assert each["compared"] > 3


def test_the_trainer_of_transformers(tmp_path: Path) -> None:
    for each in trained("transformers", tmp_path, BELOW):
        assert each["losses"] == each["whole"], each
        assert len(each["losses"]) == 12
        assert each["best"] in {4, 8, 12}
        if each["rank"] == 0:  # it writes the folders
            assert set(each["folders"]) == {"checkpoint-4", "checkpoint-8", "checkpoint-12"}
    assert_other_layouts_get_equal_state("transformers", tmp_path, step=4)


def test_accelerate(tmp_path: Path) -> None:
    for each in trained("accelerate", tmp_path, ["2,bf16", DUMMY]):
        assert each["losses"] == [some[6:] for some in each["whole"]], each
        assert len(each["losses"][1]) == 9
        assert (each["same"], each["differ"]) == (True, [])
        if each["rank"] == 0:  # it writes the folders
            assert each["folders"] == [f"checkpoint_{number}" for number in range(5)]
    assert_other_layouts_get_equal_state("accelerate", tmp_path, step=6)

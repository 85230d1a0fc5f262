"""The pipeline engine: each number of stages, with and without ZeRO 1, resumes what every other saved."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.deepspeed.stages_job import parse
from tests.integrations.rank_runs import Said, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = "tests.integrations.deepspeed.stages_job"
BF16_OPTIMIZER = 'grad_accum_dtype="fp32"'
SOME = ["0,fp32,stages=2", "1,fp32,stages=1", "0,bf16,stages=1", "1,bf16,stages=2", f"1,bf16,stages=2,{BF16_OPTIMIZER}"]
ALL = [f"{kind},stages={stages}" for kind in ("0,fp32", "1,fp32", "0,bf16", "1,bf16") for stages in (1, 2)]
ALL += [f"1,bf16,stages={stages},{BF16_OPTIMIZER}" for stages in (1, 2)]
KINDS = effort(SOME, ALL)
LOSS_SHARE = 0.01
"""By how much losses of as many stages may differ: they sum in another order."""
OTHER_SHARE = 0.1
"""And of another number of stages, which draw other numbers for dropout."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], list[float]]]:
    """A folder in which two ranks have saved each kind, and their losses by branch and rank, of which three came after the save."""
    folder = tmp_path_factory.mktemp("pipeline")
    said = run_ranks(JOB, folder, "save", *KINDS)
    assert len(said) == 2 * len(KINDS)
    return folder, {(each["ref"], each["rank"]): each["losses"] for each in said}


def check(each: Said) -> None:
    """Checks that a rank has resumed bit for bit, tied and frozen weights included."""
    assert (each["differ"], each["lost"], each["step"], each["groups"]) == ([], [], 3, [0.1, 0.0]), each
    assert each["micro_batches"] == 3 * parse_ref(each["ref"]).stages  # of the job that saved: it has two in each step, over its pipelines


def parse_ref(ref: str) -> Any:
    return {kind.ref: kind for kind in map(parse, KINDS)}[ref]


def test_each_number_of_stages_resumes_all(saved: Any) -> None:
    folder, losses = saved
    exact = 0
    for each in run_ranks(JOB, folder, "load", *KINDS):
        check(each)
        expected = losses[each["ref"], each["rank"]][3:]
        share = LOSS_SHARE if parse_ref(each["ref"]).stages == parse_ref(each["kind"]).stages else OTHER_SHARE
        assert each["losses"][0] == pytest.approx(expected[0], rel=share), each
        if each["ref"] == each["kind"]:
            assert each["losses"] == expected, each
            own = 3 * parse_ref(each["ref"]).stages * (each["rank"] + 1)  # the buffers of its layers count by it for each micro-batch
            assert each["seen"] == [[own] * 3] * (4 // parse_ref(each["ref"]).stages), each
            exact += 1
    assert exact == 2 * len(KINDS)


@pytest.mark.parametrize(("ranks", "kind"), [(1, "0,bf16,stages=1"), (4, "1,fp32,stages=2")])
def test_another_number_of_ranks(saved: Any, ranks: int, kind: str) -> None:
    folder, losses = saved
    for each in run_ranks(JOB, folder, "load", kind, ranks=ranks):
        check(each)
        assert each["losses"][0] == pytest.approx(losses[each["ref"], 0][3], rel=0.2), each


def test_layers_are_stored_by_their_numbers_and_tied_ones_once(saved: Any) -> None:
    with tsck.open(saved[0] / "store", read_only=True, cache_dir=saved[0] / "cache-test") as store:
        for ref in (name for name in store.branches() if name.startswith("runs/")):
            with store.open_snapshot(ref) as found:
                names = {name.removeprefix("model.") for name in found if name.startswith("model.")}
            blocks = {
                f"{layer}.{name}" for layer in (1, 2, 3, 4) for name in ("inner.weight", "inner.bias", "outer.weight", "outer.bias", "seen")
            }
            assert names == {"tied_modules.words.weight", *blocks}, ref

"""Models with experts: each spread of experts over ranks, in each ZeRO stage, resumes what every other saved."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.exporting import export_snapshot
from tests.effort import effort
from tests.integrations.deepspeed.stages_job import parse
from tests.integrations.rank_runs import Said, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = "tests.integrations.deepspeed.stages_job"
SOME = ["0,fp32,ep_size=2", "1,fp32,ep_size=1", "0,bf16,ep_size=1", "1,bf16,ep_size=2", "2,bf16,ep_size=1"]
SOME += ['1,bf16,ep_size=2,grad_accum_dtype="fp32"']
ALL = [f"{stage},{dtype},ep_size={size}" for dtype in ("fp32", "bf16") for stage in (0, 1, 2) for size in (1, 2)] + SOME[-1:]
KINDS = effort(SOME, ALL)
EXPERTS = 4
LOSS_SHARE = 0.01
"""By how much losses of other stages may differ: they sum in another order."""
OWN_ARITHMETIC = "runs/bf16-experts-1-0", "runs/bf16-experts-2-0"
"""DeepSpeed 0.19.8 keeps gradients in bfloat16 there."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], list[float]]]:
    """A folder in which two ranks have saved each kind, and their losses by branch and rank, of which three came after the save."""
    folder = tmp_path_factory.mktemp("experts")
    said = run_ranks(JOB, folder, "save", *KINDS)
    assert len(said) == 2 * len(KINDS)
    return folder, {(each["ref"], each["rank"]): each["losses"] for each in said}


def check(each: Said, size: int) -> None:
    """Checks that a rank has resumed bit for bit, and has the experts of its place."""
    local = EXPERTS // size
    assert (each["differ"], each["step"], each["groups"]) == ([], 3, [0.1, 0.0, 0.1, 0.0]), each
    assert each["experts"] == [each["rank"] % size * local + number for number in range(local)], each


def test_each_spread_of_experts_resumes_all(saved: Any) -> None:
    folder, losses = saved
    sizes = {kind.ref: kind.ep_size for kind in map(parse, KINDS)}
    exact = 0
    for each in run_ranks(JOB, folder, "load", *KINDS):
        check(each, sizes[each["kind"]])
        expected = losses[each["ref"], each["rank"]][3:]
        comparable = 1 if {each["ref"], each["kind"]} & {*OWN_ARITHMETIC} else 3
        assert each["losses"][:comparable] == pytest.approx(expected[:comparable], rel=LOSS_SHARE), each
        if each["ref"] == each["kind"]:
            assert each["losses"] == expected, each
            exact += 1
    assert exact == 2 * len(KINDS)


@pytest.mark.parametrize(("ranks", "kind"), [(1, "1,fp32,ep_size=1"), (4, "2,bf16,ep_size=4")])
def test_another_number_of_ranks(saved: Any, ranks: int, kind: str) -> None:
    folder, losses = saved
    for each in run_ranks(JOB, folder, "load", kind, ranks=ranks):
        check(each, parse(kind).ep_size)
        if ranks > 1 and each["rank"] < 2:  # these ranks get the same words; their dropout is another
            assert each["losses"][0] == pytest.approx(losses[each["ref"], each["rank"]][3], rel=0.2), each


def test_an_export_is_refused(saved: Any, tmp_path: Path) -> None:
    """DeepSpeed has no universal checkpoint of them."""
    store = tsck.open(saved[0] / "store", read_only=True, cache_dir=saved[0] / "cache-test")
    with store, pytest.raises(UnsupportedValueError, match="MoE experts"):
        export_snapshot(store, parse(KINDS[0]).ref, tmp_path / "out", format="deepspeed-universal")
    assert list(tmp_path.iterdir()) == []


def test_experts_are_stored_by_their_numbers(saved: Any) -> None:
    with tsck.open(saved[0] / "store", read_only=True, cache_dir=saved[0] / "cache-test") as store:
        for ref in (name for name in store.branches() if name.startswith("runs/")):
            state = store.checkout(ref)
            names = [f"moe.deepspeed_moe.experts.deepspeed_experts.{number}" for number in range(EXPERTS)]
            assert [state["model"][f"{name}.number"].item() for name in names] == [0, 1, 2, 3], ref
            first = [state["model"][f"{name}.0.weight"] for name in names]
            moments = [state["optimizer"]["state"][f"{name}.0.weight"]["exp_avg"] for name in names]
            assert not any(one.equal(other) for each in (first, moments) for one, other in pairwise(each)), ref

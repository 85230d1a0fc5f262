"""Every ZeRO stage, spread of experts and number of pipeline stages resumes what every other of its family saved, on 1, 2 and 4 ranks.

Stage 3 is in processes of its own: it replaces functions of torch for the whole process, which changes the losses of other stages by a bit.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.exporting import export_snapshot
from tensorstore_ck.store import ReadOnlyStore
from tests.effort import effort
from tests.integrations.deepspeed.stages_job import parse
from tests.integrations.rank_runs import Said, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = "tests.integrations.deepspeed.stages_job"
OFFLOADED = 'bf16,offload_optimizer={"device":"cpu"}'
OF_FP32 = 'grad_accum_dtype="fp32"'
BELOW = effort(
    ["1,bf16", "2,bf16", "0,fp16", "2,fp16", "0,fp32", "1,fp32"],
    [f"{stage},{dtype}" for dtype in ("bf16", "fp16", "fp32") for stage in (0, 1, 2)],
)
BELOW += ["2,bf16,round_robin_gradients=true", f"2,{OFFLOADED}", f"1,bf16,{OF_FP32}"]
STAGE_3 = [*effort(["3,bf16"], [f"3,{dtype}" for dtype in ("bf16", "fp16", "fp32")]), "3,bf16,sub_group_size=500", f"3,{OFFLOADED}"]
EXPERTS = effort(
    ["0,fp32,ep_size=2", "1,fp32,ep_size=1", "0,bf16,ep_size=1", "1,bf16,ep_size=2", "2,bf16,ep_size=1"],
    [f"{stage},{dtype},ep_size={size}" for dtype in ("fp32", "bf16") for stage in (0, 1, 2) for size in (1, 2)],
)
EXPERTS += [f"1,bf16,ep_size=2,{OF_FP32}"]
PIPELINES = effort(
    ["0,fp32,stages=2", "1,fp32,stages=1", "0,bf16,stages=1", "1,bf16,stages=2"],
    [f"{kind},stages={stages}" for kind in ("0,fp32", "1,fp32", "0,bf16", "1,bf16") for stages in (1, 2)],
)
PIPELINES += [f"1,bf16,stages=2,{OF_FP32}"]
FAMILIES = {"stages": [BELOW, STAGE_3], "experts": [EXPERTS], "pipelines": [PIPELINES]}
EXPERTS_COUNT = 4
LOSS_SHARE = 0.01
"""By how much losses of other stages may differ: they sum in another order."""
OTHER_SHARE = 0.1
"""And of another number of pipeline stages, which draw other numbers for dropout."""
OWN_ARITHMETIC = {"runs/fp16-0", "runs/bf16-experts-1-0", "runs/bf16-experts-2-0"}
"""DeepSpeed 0.19.8 raises the loss scale in the first before it divides by it, so that such a step is half as large as on the other stages;
in the others it keeps gradients in bfloat16."""

Saved = dict[str, tuple[Path, dict[tuple[str, int], list[float]]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """By family a folder in which two ranks have saved each kind, and losses by branch and rank, of which three came after the save."""
    found: Saved = {}
    for family, groups in FAMILIES.items():
        folder = tmp_path_factory.mktemp(family)
        said = [each for kinds in groups for each in run_ranks(JOB, folder, "save", *kinds)]
        assert len(said) == 2 * sum(map(len, groups))
        found[family] = folder, {(each["ref"], each["rank"]): each["losses"] for each in said}
    return found


def check(each: Said, kind: Any, ref: Any) -> None:
    """Checks that a rank has resumed bit for bit, tied and frozen weights included, and has the experts of its place."""
    groups = [0.1, 0.0, 0.1, 0.0] if kind.ep_size else [0.1, 0.0]
    assert (each["differ"], each["lost"], each["step"], each["groups"]) == ([], [], 3, groups), each
    if kind.ep_size:
        local = EXPERTS_COUNT // kind.ep_size
        assert each["experts"] == [each["rank"] % kind.ep_size * local + number for number in range(local)], each
    if kind.stages:
        assert each["micro_batches"] == 3 * ref.stages  # of the job that saved: it has two in each step, over its pipelines


@pytest.mark.parametrize(("family", "kinds"), [(family, kinds) for family, groups in FAMILIES.items() for kinds in groups])
def test_each_kind_resumes_all(saved: Saved, family: str, kinds: list[str]) -> None:
    folder, losses = saved[family]
    parsed = {kind.ref: kind for group in FAMILIES[family] for kind in map(parse, group)}
    exact = 0
    for each in run_ranks(JOB, folder, "load", *kinds):
        kind, ref = parsed[each["kind"]], parsed[each["ref"]]
        check(each, kind, ref)
        assert each["client"] == {"epoch": 7, "rank": each["rank"]}
        expected = losses[each["ref"], each["rank"]][3:]
        comparable = 1 if kind.stages or OWN_ARITHMETIC & {each["ref"], each["kind"]} else 3
        share = LOSS_SHARE if kind.stages == ref.stages else OTHER_SHARE
        assert each["losses"][:comparable] == pytest.approx(expected[:comparable], rel=share), each
        if family == "stages":
            assert each["seen"] == [3.0 * (each["rank"] + 1)] * 3
            assert each["path"].endswith(f"{each['ref']}/global_step3")
        if kind == ref:
            assert each["losses"] == expected, each
            own = 3 * ref.stages * (each["rank"] + 1)  # the buffers of its layers count by it for each micro-batch
            assert not kind.stages or each["seen"] == [[own] * 3] * (4 // ref.stages), each
            exact += 1
    assert exact == 2 * len(kinds)


@pytest.mark.parametrize(
    ("family", "ranks", "kind"),
    [
        ("stages", 1, "2,bf16"),
        ("stages", 4, "3,bf16"),
        ("experts", 1, "1,fp32,ep_size=1"),
        ("experts", 4, "2,bf16,ep_size=4"),
        ("pipelines", 1, "0,bf16,stages=1"),
        ("pipelines", 4, "1,fp32,stages=2"),
        *effort([], [("stages", ranks, kind) for ranks in (1, 4) for kind in [*BELOW, *STAGE_3]]),
    ],
)
def test_another_number_of_ranks(saved: Saved, family: str, ranks: int, kind: str) -> None:
    folder, losses = saved[family]
    parsed = {kind.ref: kind for group in FAMILIES[family] for kind in map(parse, group)}
    for each in run_ranks(JOB, folder, "load", kind, ranks=ranks):
        check(each, parse(kind), parsed[each["ref"]])
        assert family != "stages" or each["client"] == {"epoch": 7, "rank": 0}
        if family == "pipelines" or (ranks > 1 and each["rank"] < 2):  # these ranks get the same words; their dropout is another
            rank = 0 if family == "pipelines" else each["rank"]
            assert each["losses"][0] == pytest.approx(losses[each["ref"], rank][3], rel=0.2), each


def opened(saved: Saved, family: str) -> ReadOnlyStore:
    return tsck.open(saved[family][0] / "store", read_only=True, cache_dir=saved[family][0] / "cache-test")


def test_masters_are_those_of_the_weights_and_stages_share_blocks(saved: Saved) -> None:
    with opened(saved, "stages") as store:
        for ref in (name for name in store.branches() if name.startswith("runs/bf16")):
            state = store.checkout(ref)
            masters = {name: each["master"] for name, each in state["optimizer"]["state"].items()}
            assert len(masters) == 5
            assert all(bool((each.bfloat16() == state["model"][name]).all()) for name, each in masters.items()), ref
            assert state["model"]["head.weight"].equal(state["model"]["words.weight"])
        same = store.diff("runs/bf16-1", "runs/bf16-2")
        assert (same.tensors, same.changed_bytes) == ((), 0)
        assert store.resolve("runs/bf16-2").new_bytes < store.resolve("runs/bf16-1").new_bytes


def test_experts_are_stored_by_their_numbers_and_not_exported(saved: Saved, tmp_path: Path) -> None:
    """DeepSpeed has no universal checkpoint of them."""
    with opened(saved, "experts") as store:
        for ref in (name for name in store.branches() if name.startswith("runs/")):
            state = store.checkout(ref)
            names = [f"moe.deepspeed_moe.experts.deepspeed_experts.{number}" for number in range(EXPERTS_COUNT)]
            assert [state["model"][f"{name}.number"].item() for name in names] == [0, 1, 2, 3], ref
            first = [state["model"][f"{name}.0.weight"] for name in names]
            moments = [state["optimizer"]["state"][f"{name}.0.weight"]["exp_avg"] for name in names]
            assert not any(one.equal(other) for each in (first, moments) for one, other in pairwise(each)), ref
        with pytest.raises(UnsupportedValueError, match="MoE experts"):
            export_snapshot(store, parse(EXPERTS[0]).ref, tmp_path / "out", format="deepspeed-universal")
    assert list(tmp_path.iterdir()) == []


def test_layers_are_stored_by_their_numbers_and_tied_ones_once(saved: Saved) -> None:
    names = ("inner.weight", "inner.bias", "outer.weight", "outer.bias", "seen")
    with opened(saved, "pipelines") as store:
        for ref in (name for name in store.branches() if name.startswith("runs/")):
            with store.open_snapshot(ref) as found:
                stored = {name.removeprefix("model.") for name in found if name.startswith("model.")}
            assert stored == {"tied_modules.words.weight", *(f"{layer}.{name}" for layer in (1, 2, 3, 4) for name in names)}, ref

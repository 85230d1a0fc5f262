"""Every ZeRO stage resumes what every other saved, on 1, 2 and 4 ranks.

Stage 3 is in processes of its own: it replaces functions of torch for the whole process, which changes the losses of other stages by a bit.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.rank_runs import Said, run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

JOB = "tests.integrations.deepspeed.stages_job"
OFFLOADED = 'bf16,offload_optimizer={"device":"cpu"}'
EVERY = [f"{stage},{dtype}" for dtype in ("bf16", "fp16", "fp32") for stage in (0, 1, 2)]
BELOW = effort(["0,bf16", "1,bf16", "2,bf16", "0,fp16", "2,fp16", "0,fp32", "1,fp32"], EVERY)
BELOW += ["2,bf16,round_robin_gradients=true", f"2,{OFFLOADED}", '1,bf16,grad_accum_dtype="fp32"']
STAGE_3 = [*effort(["3,bf16"], [f"3,{dtype}" for dtype in ("bf16", "fp16", "fp32")]), "3,bf16,sub_group_size=500", f"3,{OFFLOADED}"]
LOSS_SHARE = 0.01
"""By how much losses of other stages may differ: they sum in another order."""
OWN_ARITHMETIC = "runs/fp16-0"
"""DeepSpeed 0.19.8 raises the loss scale there before it divides by it, so that such a step is half as large as on the other stages."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[tuple[str, int], list[float]]]:
    """A folder in which two ranks have saved each kind, and their losses by branch and rank, of which three came after the save."""
    folder = tmp_path_factory.mktemp("stages")
    said = [each for kinds in (BELOW, STAGE_3) for each in run_ranks(JOB, folder, "save", *kinds)]
    assert len(said) == 2 * len(BELOW + STAGE_3)
    return folder, {(each["ref"], each["rank"]): each["losses"] for each in said}


def resumed(folder: Path, kinds: list[str], ranks: int = 2) -> list[Said]:
    """What the ranks say after each kind has loaded all snapshots of its dtype."""
    return run_ranks(JOB, folder, "load", *kinds, ranks=ranks)


@pytest.mark.parametrize("kinds", [BELOW, STAGE_3], ids=["below", "stage-3"])
def test_each_stage_resumes_all_stages(saved: Any, kinds: list[str]) -> None:
    folder, losses = saved
    exact = 0
    for each in resumed(folder, kinds):
        assert (each["differ"], each["step"], each["groups"]) == ([], 3, [0.1, 0.0]), each
        assert each["client"] == {"epoch": 7, "rank": each["rank"]}
        assert each["seen"] == [3.0 * (each["rank"] + 1)] * 3
        assert each["path"].endswith(f"{each['ref']}/global_step3")
        expected = losses[each["ref"], each["rank"]][3:]
        comparable = 1 if OWN_ARITHMETIC in (each["ref"], each["kind"]) else 3
        assert each["losses"][:comparable] == pytest.approx(expected[:comparable], rel=LOSS_SHARE), each
        if each["ref"] == each["kind"]:
            assert each["losses"] == expected, each
            exact += 1
    assert exact == 2 * len(kinds)


@pytest.mark.parametrize("ranks", [1, 4])
def test_another_number_of_ranks(saved: Any, ranks: int) -> None:
    folder, losses = saved
    for kind in effort(["2,bf16"], BELOW), effort(["3,bf16"], STAGE_3):
        for each in resumed(folder, kind, ranks):
            assert (each["differ"], each["step"], each["groups"], each["client"]) == ([], 3, [0.1, 0.0], {"epoch": 7, "rank": 0}), each
            if ranks > 1 and each["rank"] < 2:  # these ranks get the same words; their dropout is another
                assert each["losses"][0] == pytest.approx(losses[each["ref"], each["rank"]][3], rel=0.2), each


def test_masters_are_those_of_the_weights_and_stages_share_blocks(saved: Any) -> None:
    with tsck.open(saved[0] / "store", read_only=True, cache_dir=saved[0] / "cache-test") as store:
        for ref in (name for name in store.branches() if name.startswith("runs/bf16")):
            state = store.checkout(ref)
            masters = {name: each["master"] for name, each in state["optimizer"]["state"].items()}
            assert len(masters) == 5
            assert all(bool((each.bfloat16() == state["model"][name]).all()) for name, each in masters.items()), ref
            assert state["model"]["head.weight"].equal(state["model"]["words.weight"])
        same = store.diff("runs/bf16-1", "runs/bf16-2")
        assert (same.tensors, same.changed_bytes) == ((), 0)
        assert store.resolve("runs/bf16-2").new_bytes < store.resolve("runs/bf16-1").new_bytes

"""DeepSpeed's own folders of models with experts, and of pipelines, become the snapshots that `tensorstore_ck.deepspeed` saves."""

import shutil
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.store import Store
from tests.effort import effort
from tests.integrations.deepspeed.same_bits import differences
from tests.integrations.deepspeed.spoiled import Bad, Opens, changed, model_file, optimizer_file, require_not_run, require_refused, update
from tests.integrations.deepspeed.stages_job import SAVED_AFTER, parse
from tests.integrations.deepspeed.test_import import TAG, tensors_and_values
from tests.integrations.rank_runs import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

JOB = "tests.integrations.deepspeed.folders_job"
BF16 = 'grad_accum_dtype="fp32"'
EXPERTS = ["2,bf16,ep_size=2", "0,bf16,ep_size=2", f"1,bf16,ep_size=2,{BF16}", *effort([], ["1,fp32,ep_size=4", "2,fp32,ep_size=1"])]
PIPELINES = ["1,bf16,stages=2", "0,bf16,stages=2", f"1,bf16,stages=2,{BF16}", *effort([], ["1,fp32,stages=4", "1,fp32,stages=1"])]
UNNAMED = "0,fp32,stages=2"
ELASTIC = "1,bf16,elastic_checkpoint=true"
RANKS = 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which four ranks have saved each kind, as DeepSpeed does and to a store."""
    folder = tmp_path_factory.mktemp("parts")
    for kinds in ([*EXPERTS, *PIPELINES, UNNAMED], [ELASTIC]):  # DeepSpeed makes no other engine after pipelines
        run_ranks(JOB, folder, "save", *kinds, ranks=RANKS)
    return folder


@pytest.mark.parametrize("kind", [*EXPERTS, *PIPELINES])
def test_a_folder_is_what_an_engine_saves(saved: Path, store: Store, kind: str) -> None:
    ref = parse(kind).ref
    imported = import_checkpoint(store, saved / ref, ref="runs/a")
    assert (imported.snapshot.step, imported.contents.skipped) == (SAVED_AFTER, {})
    with tsck.open(saved / "store", read_only=True, cache_dir=saved / "cache-test") as by_engine:
        expected = tensors_and_values(by_engine, ref)
    assert len(expected) > 120
    assert differences(expected, tensors_and_values(store, "runs/a")) == []


@pytest.mark.parametrize(
    ("kinds", "kind", "ranks"),
    [
        (EXPERTS[:3], "1,bf16,ep_size=1", 2),
        (PIPELINES[:3], "1,bf16,stages=1", 1),
        *effort([], [(EXPERTS[:3], "2,bf16,ep_size=4", 4), (PIPELINES[:3], "0,bf16,stages=2", 2)]),
    ],
)
def test_an_engine_with_other_parts_resumes_from_an_import(saved: Path, tmp_path: Path, kinds: list[str], kind: str, ranks: int) -> None:
    refs = [parse(each).ref for each in kinds]
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        for ref in refs:
            import_checkpoint(store, saved / ref, ref=ref)
    said = run_ranks("tests.integrations.deepspeed.stages_job", tmp_path, "load", kind, ranks=ranks)
    assert {each["ref"] for each in said} == set(refs)
    for each in said:
        assert (each["differ"], each["lost"], each["step"]) == ([], [], SAVED_AFTER), each
        assert each["client"] == {"epoch": 7, "rank": 0}
        assert each["compared"] > 20 or each["rank"]
        if parse(kind).ep_size:
            count = 4 // parse(kind).ep_size
            first = each["rank"] % parse(kind).ep_size * count
            assert each["experts"] == [*range(first, first + count)]


# --- bad folders ----------------------------------------------------------------------------------------------------------


def expert_file(tag: Path, number: int) -> Path:
    return tag / f"layer_0_expert_{number}_mp_rank_00_model_states.pt"


def move(content: dict[str, Any]) -> None:
    for each in content.values():
        each.add_(1)


def cut(content: dict[str, Any]) -> None:
    name = next(name for name in content if name.endswith("weight"))
    content[name] = content[name][:-1].clone()


def other_ranks_experts(tag: Path) -> None:
    """Rank 0 and rank 1 have other experts: their files exchanged."""
    one, other = optimizer_file(tag, 0), optimizer_file(tag, 1)
    one.rename(tag / "x"), other.rename(one), (tag / "x").rename(other)


def set_ep_size(content: dict[str, Any]) -> None:
    for group in content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
        if group.get("moe"):
            group["name"] = "ep_size_3"


def set_ep_sizes(tag: Path) -> None:
    for rank in range(RANKS):
        changed(optimizer_file(tag, rank), set_ep_size)


def set_tensor_parallel(tag: Path) -> None:
    changed(model_file(tag), lambda content: content["checkpoint_parallel_dimensions"].update(tp_degree=2))


MOE, NO_ZERO, PIPELINE = EXPERTS[0], EXPERTS[1], PIPELINES[0]
STAGE_1, OF_STAGE_1 = "mp_rank_01_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_01"
BAD = [
    Bad(MOE, lambda tag: expert_file(tag, 2).unlink(), "lacks layer_0_expert_2_mp_rank_00.*has 4 experts"),
    Bad(MOE, lambda tag: optimizer_file(tag, 3).unlink(), "lacks bf16_zero_pp_rank_3_mp"),
    Bad(NO_ZERO, lambda tag: (tag / "expp_rank_0_mp_rank_00_optim_states.pt").unlink(), "lacks expp_rank_0"),
    Bad(NO_ZERO, lambda tag: (tag / "expp_rank_1_mp_rank_00_optim_states.pt").unlink(), "lacks expp_rank_1.* spread over 2 ranks"),
    Bad(MOE, lambda tag: changed(expert_file(tag, 1), move), "differ from its masters"),
    Bad(MOE, lambda tag: changed(expert_file(tag, 1), cut), "has shape"),
    Bad(MOE, other_ranks_experts, "differ|param_slice_mappings"),
    Bad(MOE, lambda tag: update(model_file(tag), num_experts=["many"]), "num_experts .* do not fit"),
    Bad(MOE, set_ep_sizes, "'?ep_size_3'? does not fit 4 ranks"),
    Bad(PIPELINE, lambda tag: (tag / "layer_03-model_states.pt").unlink(), r"lacks the file of the layer .*3\."),
    Bad(PIPELINE, lambda tag: (tag / "layer_00-model_states.pt").unlink(), "layer that has tied_modules"),
    Bad(PIPELINE, lambda tag: (tag / STAGE_1).unlink(), f"lacks {STAGE_1}"),
    Bad(PIPELINE, lambda tag: (tag / f"{OF_STAGE_1}_optim_states.pt").unlink(), f"lacks {OF_STAGE_1}"),
    Bad(PIPELINE, lambda tag: update(tag / STAGE_1, global_steps=9), "files of stages 0 and 1 are of different saves"),
    Bad(PIPELINE, lambda tag: changed(tag / "layer_01-model_states.pt", move), "differ from its masters"),
    Bad(MOE, lambda tag: update(model_file(tag), ds_autoep_layers=[{}]), "experts of AutoEP", UnsupportedValueError),
    Bad(ELASTIC, lambda tag: None, r"with elastic_checkpoint \(.*\), which is not imported: load it with DeepSpeed", UnsupportedValueError),
    Bad(UNNAMED, lambda tag: None, "pipeline without ZeRO: .* load it with DeepSpeed", UnsupportedValueError),
    Bad(PIPELINE, set_tensor_parallel, "a pipeline with tensor parallelism", UnsupportedValueError),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.message[:40])
def test_a_bad_folder_is_refused(saved: Path, store: Store, tmp_path: Path, case: Bad) -> None:
    case.spoil(shutil.copytree(saved / parse(case.kind).ref, tmp_path / "old") / TAG)
    require_refused(store, tmp_path / "old", case)


@pytest.mark.parametrize(
    ("kind", "name"), [(MOE, expert_file(Path(), 1).name), (PIPELINE, "layer_02-model_states.pt"), (PIPELINE, STAGE_1)]
)
def test_nothing_in_a_folder_is_run(saved: Path, store: Store, tmp_path: Path, kind: str, name: str) -> None:
    tag = shutil.copytree(saved / parse(kind).ref, tmp_path / "old") / TAG
    changed(tag / name, lambda content: content.update({"x.deepspeed_moe.experts.deepspeed_experts.1.mine": Opens(tmp_path / "opened")}))
    require_not_run(store, tmp_path / "old", tmp_path / "opened")


def test_files_of_more_stages_are_left_over(saved: Path, store: Store, tmp_path: Path) -> None:
    tag = shutil.copytree(saved / parse(PIPELINE).ref, tmp_path / "old") / TAG
    shutil.copy(tag / STAGE_1, tag / "mp_rank_02_model_states.pt")
    found = import_checkpoint(store, tmp_path / "old", ref="runs/a").contents
    assert "left over" in found.skipped["mp_rank_02_model_states.pt"]

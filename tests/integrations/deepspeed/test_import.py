"""DeepSpeed's own folders become the snapshots that `tensorstore_ck.deepspeed` saves, and bad ones nothing."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import CorruptObjectError, NotFoundError, StoreError, UnsupportedValueError
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.store import ReadOnlyStore, Store
from tests.effort import effort
from tests.integrations.deepspeed.same_bits import differences
from tests.integrations.deepspeed.spoiled import Bad, Opens, changed, model_file, optimizer_file, require_not_run, require_refused, update
from tests.integrations.deepspeed.stages_job import SAVED_AFTER, parse
from tests.integrations.rank_runs import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

JOB = "tests.integrations.deepspeed.folders_job"
RANKS = 3
BELOW = ["0,bf16", '1,bf16,grad_accum_dtype="fp32"', "2,bf16,round_robin_gradients=true", "2,fp16", "1,fp32"]
BELOW += effort([], ["0,fp16", "1,bf16", '2,bf16,offload_optimizer={"device":"cpu"}', "1,bf16,parameter_alignment=true"])
STAGE_3 = ["3,bf16,sub_group_size=500", "3,fp32", *effort([], ["3,bf16", "3,fp16"])]
SAVED = [parse(each).ref for each in BELOW + STAGE_3]
TAG = f"global_step{SAVED_AFTER}"
NOT_IN_A_FOLDER = {"ranks", "scaler.last_overflow_iter"}  # the second is not saved by DeepSpeed without a dynamic scale


def tensors_and_values(store: ReadOnlyStore, ref: str) -> dict[str, Any]:
    """All but each rank's own, by name."""
    with store.open_snapshot(ref) as found:
        tensors = {name: found[name][...] for name in found}
        values = found.state_values
    return {name: each for name, each in {**values, **tensors}.items() if name not in NOT_IN_A_FOLDER and not name.startswith("rank.")}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which three ranks have saved each kind, as DeepSpeed does and to a store."""
    folder = tmp_path_factory.mktemp("folders")
    for kinds in (BELOW, STAGE_3):
        run_ranks(JOB, folder, "save", *kinds, ranks=RANKS)
    return folder


def universal(folder: Path, target: Path) -> Path:
    """DeepSpeed's conversion of a folder; run in a process of its own."""
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    command += ["--input_folder", str(folder / TAG), "--output_folder", str(target / TAG), "--num_extract_workers", "1"]
    target.mkdir()
    done = subprocess.run(
        [*command, "--num_merge_workers", "1"], env={**os.environ, "DS_ACCELERATOR": "cpu"}, capture_output=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("ref", SAVED)
def test_a_folder_is_what_an_engine_saves(saved: Path, store: Store, ref: str) -> None:
    imported = import_checkpoint(store, saved / ref, ref="runs/a")
    assert (imported.snapshot.step, imported.contents.skipped) == (SAVED_AFTER, {})
    assert imported.contents.metadata["deepspeed"]["tag"] == TAG  # type: ignore[index]
    with tsck.open(saved / "store", read_only=True, cache_dir=saved / "cache-test") as by_engine:
        expected = tensors_and_values(by_engine, ref)
    assert len(expected) > 60
    assert differences(expected, tensors_and_values(store, "runs/a")) == []
    assert store.checkout("runs/a")["rank"]["rank_values"]["client_state"] == {"epoch": 7, "rank": 0}
    again = import_checkpoint(store, saved / ref / TAG, ref="runs/b")
    assert store.diff("runs/a", "runs/b").changed_bytes == 0
    assert again.snapshot.logical_bytes == imported.snapshot.logical_bytes


@pytest.mark.parametrize("ref", [SAVED[3], SAVED[len(BELOW)]])
def test_a_universal_folder_is_what_an_engine_saves(saved: Path, store: Store, tmp_path: Path, ref: str) -> None:
    folder = universal(saved / ref, tmp_path / "universal")
    import_checkpoint(store, folder, ref="runs/a")
    with tsck.open(saved / "store", read_only=True, cache_dir=saved / "cache-test") as by_engine:
        assert differences(tensors_and_values(by_engine, ref), tensors_and_values(store, "runs/a")) == []
    (folder / TAG / "zero" / "outer.bias" / "fp32.pt").unlink()
    with pytest.raises(CorruptObjectError, match=r"lacks zero/outer\.bias/fp32\.pt"):
        import_checkpoint(store, folder, ref="runs/b")
    assert set(store.branches()) == {"runs/a"}


@pytest.mark.parametrize(("kind", "ranks"), [("2,bf16", 2), *effort([], [("3,bf16", 1), ("1,bf16", 4)])])
def test_an_engine_of_another_stage_resumes_from_an_import(saved: Path, tmp_path: Path, kind: str, ranks: int) -> None:
    refs = [ref for ref in SAVED if ref.startswith("runs/bf16-")]
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        for ref in refs:
            import_checkpoint(store, saved / ref, ref=ref)
    said = run_ranks("tests.integrations.deepspeed.stages_job", tmp_path, "load", kind, ranks=ranks)
    assert {each["ref"] for each in said} == set(refs)
    for each in said:
        assert (each["differ"], each["step"], each["groups"], each["client"]) == ([], SAVED_AFTER, [0.1, 0.0], {"epoch": 7, "rank": 0}), (
            each
        )
        assert each["seen"] == [float(SAVED_AFTER)] * 3
        assert each["path"].endswith(TAG)


def test_an_import_needs_no_deepspeed(saved: Path, tmp_path: Path) -> None:
    program = "import sys; sys.modules['deepspeed'] = None; from tensorstore_ck.cli import main; main()"
    command = ["import", str(saved / "runs/fp16-2"), "--ref", "runs/a", "-s", str(tmp_path / "store"), "--dry-run"]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "found a DeepSpeed checkpoint: 29 tensors" in done.stdout


# --- bad folders ----------------------------------------------------------------------------------------------------------


def set_step(content: Any) -> None:
    inner = content["optimizer_state_dict"]
    states = inner.get("base_optimizer_state", inner.get("optimizer_state_dict"))["state"]
    for state in states.values():
        state["step"] += 1


def move_masters(content: Any) -> None:
    content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data.mul_(1.01)


def forget_masters(tag: Path) -> None:
    changed(optimizer_file(tag, 2), lambda content: content["optimizer_state_dict"].pop("single_partition_of_fp32_groups"))


def set_partitions(tag: Path) -> None:
    changed(optimizer_file(tag, 0), lambda content: content["optimizer_state_dict"].update(partition_count=[4, 4]))


def swap_shapes(content: Any) -> None:
    shapes = content["param_shapes"][0]
    shapes["inner.weight"], shapes["outer.weight"] = shapes["outer.weight"], shapes["inner.weight"]


def reorder(content: Any) -> None:
    content["param_shapes"][0] = dict(reversed(content["param_shapes"][0].items()))


def shrink(content: Any) -> None:
    content["param_shapes"][-1]["inner.bias"] = torch.Size([35])


def shrink_all(tag: Path) -> None:
    for rank in range(RANKS):
        changed(model_file(tag, rank), shrink)


def remove_optimizers(tag: Path) -> None:
    for path in tag.glob("*optim*"):
        path.unlink()


BAD = [
    Bad("bf16-1", lambda tag: optimizer_file(tag, 1).unlink(), "lacks bf16_zero_pp_rank_1_mp"),
    Bad("bf16-3", lambda tag: model_file(tag, 2).unlink(), "lacks zero_pp_rank_2_mp"),
    Bad("bf16-1", lambda tag: model_file(tag).unlink(), "lacks mp_rank_00_model_states"),
    Bad("fp16-2", remove_optimizers, "lacks zero_pp_rank_0"),
    Bad("bf16-1", lambda tag: changed(optimizer_file(tag, 1), set_step), "step of group 0 differs"),
    Bad("bf16-3", lambda tag: update(model_file(tag, 1), global_steps=4), "global_steps are 3 and 4"),
    Bad("fp16-2", lambda tag: changed(optimizer_file(tag, 0), move_masters), "masters"),
    Bad("fp16-2", lambda tag: shutil.copy(model_file(tag), tag / "zero_pp_rank_0_mp_rank_00_model_states.pt"), "mixed"),
    Bad("bf16-1", forget_masters, r"DeepSpeed 0\.19\.8 laid out the optimizer of rank 2"),
    Bad("bf16-1", lambda tag: changed(model_file(tag), lambda content: content.pop("param_shapes")), "param_shapes has no list"),
    Bad("bf16-1", set_partitions, "one of 4 parts, where there are 3"),
    Bad("bf16-1", lambda tag: changed(model_file(tag), swap_shapes), "param_slice_mappings|has shape"),
    Bad("bf16-3", shrink_all, "need"),
    Bad("bf16-3", lambda tag: changed(model_file(tag, 1), shrink), "parameters of other shapes"),
    Bad("fp16-2", lambda tag: changed(model_file(tag), reorder), "param_slice_mappings"),
    Bad("round_robin", lambda tag: changed(model_file(tag), reorder), "differ from its masters"),
    Bad("fp16-2", lambda tag: os.truncate(optimizer_file(tag, 1), 9000), "optim_states"),
    Bad("bf16-1", lambda tag: (tag / "expp_rank_0_mp_rank_00_optim_states.pt").touch(), "num_experts None"),
    Bad("bf16-1", lambda tag: (tag / "mp_rank_01_model_states.pt").touch(), "with tensor par", UnsupportedValueError),
    Bad(
        "bf16-1",
        lambda tag: update(model_file(tag), mp_world_size=2),
        "tensor parallelism over 2 ranks, which is not imported: load it with DeepSpeed, then save it with tensorstore_ck",
        UnsupportedValueError,
    ),
    Bad("bf16-1", lambda tag: (tag / "layer_00-model_00-model_states.pt").touch(), "a pipeline with tensor", UnsupportedValueError),
    Bad("bf16-1", lambda tag: (tag / "expert_0_mp_rank_00_model_states.pt").touch(), "an old version", UnsupportedValueError),
    Bad("bf16-1", lambda tag: (tag.parent / "latest").write_text("global_step9"), "'global_step9', which does not exist", NotFoundError),
    Bad("bf16-1", lambda tag: (tag.parent / "latest").unlink(), "has no latest: give .*global_step3", NotFoundError),
    Bad("bf16-1", lambda tag: (tag.parent / "latest").write_text("../x"), "x", StoreError),
]


def copy_of(saved: Path, tmp_path: Path, name: str) -> Path:
    (source,) = [saved / ref for ref in SAVED if name in ref and (name != "bf16-1" or "grad_accum" in ref)]
    shutil.copytree(source, tmp_path / "old")
    return tmp_path / "old" / TAG


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.message[:40])
def test_a_bad_folder_is_refused(saved: Path, store: Store, tmp_path: Path, case: Bad) -> None:
    case.spoil(copy_of(saved, tmp_path, case.kind))
    require_refused(store, tmp_path / "old", case)


@pytest.mark.parametrize("place", ["module", "client", "loss_scaler", "file"])
def test_nothing_in_a_folder_is_run(saved: Path, store: Store, tmp_path: Path, place: str) -> None:
    tag = copy_of(saved, tmp_path, "fp16-2")
    bomb = Opens(tmp_path / "opened")
    if place == "file":
        optimizer_file(tag, 0).write_bytes(pickle.dumps(bomb))
    elif place == "loss_scaler":
        changed(optimizer_file(tag, 0), lambda content: content["optimizer_state_dict"].update(loss_scaler=bomb))
    else:
        changed(model_file(tag), lambda content: (content["module"] if place == "module" else content).update({"mine": bomb}))
    require_not_run(store, tmp_path / "old", bomb.path)
    if place == "client":
        import_checkpoint(store, tmp_path / "old", ref="runs/a", exclude=["rank.rank_values.client_state.mine"])
        assert "mine" not in store.checkout("runs/a")["rank"]["rank_values"]["client_state"]


@pytest.mark.parametrize(("kind", "left"), [("fp16-2", [optimizer_file]), ("bf16-3", [optimizer_file, model_file])])
def test_files_of_more_ranks_are_left_over(saved: Path, store: Store, tmp_path: Path, kind: str, left: list[Callable[..., Path]]) -> None:
    tag = copy_of(saved, tmp_path, kind)
    names = {"rank_7".join(file(tag, 1).name.split("rank_1", 1)): file(tag, 1) for file in left}
    for name, file in names.items():
        shutil.copy(file, tag / name)
    skipped = import_checkpoint(store, tmp_path / "old", ref="runs/a").contents.skipped
    assert all("left over" in skipped[name] for name in names)

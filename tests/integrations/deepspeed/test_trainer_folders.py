"""Folders of transformers' Trainer and of accelerate with DeepSpeed: a resume from their import is the trainer's own, bit for bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: run `make test-apart`")

import tensorstore_ck as tsck
from tensorstore_ck.errors import NotFoundError, UnsupportedValueError
from tensorstore_ck.integrations.importing import import_checkpoint
from tensorstore_ck.store import ReadOnlyStore, Store
from tests.effort import effort
from tests.integrations.deepspeed.same_bits import differences
from tests.integrations.deepspeed.spoiled import Bad, Opens, changed, optimizer_file, require_not_run, require_refused, update
from tests.integrations.deepspeed.stages_job import parse
from tests.integrations.rank_runs import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

JOB = "tests.integrations.deepspeed.trainers_job"
BELOW = {"transformers": ["2,bf16", *effort([], ["1,fp32"])], "accelerate": ["2,bf16,dummy=true", *effort([], ["2,bf16"])]}
STAGE_3 = {"transformers": ["3,bf16"], "accelerate": effort([], ["3,bf16"])}
SAVED_IN = {"transformers": "checkpoint-4", "accelerate": "checkpoint_1"}
STEP = {"transformers": 4, "accelerate": 1}
NOT_NATIVE = {"trainer_state", "loaders"}
"""Values of a rank that the trainer's own folder does not have, or has of the first rank alone."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each trainer, in which two ranks have saved each kind, as the trainer does and to a store."""
    folder = tmp_path_factory.mktemp("trainers")
    for trainer in SAVED_IN:
        for kinds in (BELOW[trainer], STAGE_3[trainer]):
            if kinds:
                run_ranks(JOB, folder / trainer, trainer, "save-natively", *kinds)
    return folder


def native_folder(saved: Path, trainer: str, kind: str) -> Path:
    (found,) = (saved / trainer / parse(kind).ref / "native").glob(f"**/{SAVED_IN[trainer]}")
    return found


def shared(store: ReadOnlyStore, address: str) -> dict[str, Any]:
    """All that ranks share, by name."""
    with store.open_snapshot(address) as found:
        state = {**found.state_values, **{name: found[name][...] for name in found}}
    return {name: each for name, each in state.items() if not name.startswith("rank.")}


def flat(state: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(state, dict):
        return {path: state}
    return {name: each for key, below in state.items() for name, each in flat(below, f"{path}.{key}").items()}


@pytest.mark.parametrize("trainer", SAVED_IN)
def test_a_folder_is_what_the_trainer_over_a_store_saves(saved: Path, trainer: str) -> None:
    folder = saved / trainer
    with tsck.open(folder / "store", cache_dir=folder / "cache-test") as store:
        for kind in BELOW[trainer] + STAGE_3[trainer]:
            ref = parse(kind).ref
            imported = import_checkpoint(store, native_folder(saved, trainer, kind), ref=f"imported/{ref}")
            assert imported.snapshot.step == STEP[trainer]
            assert imported.contents.skipped.keys() <= {"training_args.bin", "model.safetensors"}
            expected, found = (shared(store, each) for each in (f"{ref}@{STEP[trainer]}", f"imported/{ref}"))
            assert len(expected) > 20
            assert differences(expected, found) == []
            own = store.checkout(f"imported/{ref}")["rank"]
            for rank in (0, 1):
                there = store.rank_state(f"{ref}@{STEP[trainer]}", rank=rank)
                assert own[str(rank)]["rank_values"].keys() == there["rank_values"].keys()
                here, there = (flat({**each, "environment": {}}) for each in (own[str(rank)], there))
                differ = [name for name in differences(here, there) if not NOT_NATIVE & {*name.split(".")}]
                assert differ == [".rank_values.custom_0.value"] * (trainer == "accelerate" and rank == 1)  # accelerate saves the first's
                assert ".generators.torch" in here
    for kinds in (BELOW[trainer], STAGE_3[trainer]):
        said = run_ranks(JOB, folder, trainer, "resume-imported", *kinds) if kinds else []
        assert len(said) == 2 * len(kinds)
        for each in said:
            assert each["imported"] == each["natively"]
            assert each["differ"] == []
            assert each["compared"] > 10 or each["rank"] == 1


def test_another_number_of_ranks_resumes_from_the_import(saved: Path, tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        import_checkpoint(store, native_folder(saved, "transformers", "3,bf16"), ref="runs/bf16-3")
    for each in run_ranks(JOB, tmp_path, "transformers", "load", "1,bf16", ranks=1):
        assert (each["differ"], each["step"]) == ([], 4)
        assert each["compared"] > 3


# --- bad folders ----------------------------------------------------------------------------------------------------------


def set_steps(folder: Path) -> None:
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": 3}))


def move_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    found = load_file(folder / "model.safetensors")
    save_file({name: each + 1 for name, each in found.items()}, folder / "model.safetensors")


def forget_numpy(content: dict[str, Any]) -> None:
    content["numpy"] = ("PCG64", *content["numpy"][1:])


HF, ACC = "transformers", "accelerate"
STATES_1 = "random_states_1.pkl"
BAD = [
    Bad(HF, lambda at: (at / "rng_state_1.pth").unlink(), "lacks rng_state_1.pth"),
    Bad(ACC, lambda at: (at / "random_states_0.pkl").unlink(), "lacks random_states_0"),
    Bad(HF, lambda at: optimizer_file(at / "global_step4", 1).unlink(), "lacks bf16_zero_pp_rank_1"),
    Bad(HF, set_steps, r"of step 4 and trainer_state\.json of step 3: two saves are mixed"),
    Bad(HF, move_weights, r"model\.safetensors differs from global_step4"),
    Bad(ACC, lambda at: update(at / STATES_1, step=9), "random_states are of different steps"),
    Bad(HF, lambda at: changed(at / "rng_state_1.pth", forget_numpy), r"rng_state_1\.pth has no state of NumPy's generator \(PCG64\)"),
    Bad(ACC, lambda at: update(at / STATES_1, torch_manual_seed=torch.zeros(3)), "no state of torch's generator"),
    Bad(ACC, lambda at: update(at / STATES_1, random_state=(3, (1, 2), None)), "state of Python's generator in .* is malformed"),
    Bad(ACC, lambda at: (at / "custom_checkpoint_0.pkl").write_bytes(b"PK"), "no file of torch.save"),
    Bad(ACC, lambda at: (at / "pytorch_model_1").mkdir(), "several engines of DeepSpeed", UnsupportedValueError),
    Bad(ACC, lambda at: (at / "sampler.bin").touch(), "a pickled sampler", UnsupportedValueError),
    Bad(HF, lambda at: shutil.rmtree(at / "global_step4"), "'global_step4', which does not exist", NotFoundError),
]


@pytest.mark.parametrize("case", BAD, ids=lambda case: case.message[:40])
def test_a_bad_folder_is_refused(saved: Path, store: Store, tmp_path: Path, case: Bad) -> None:
    folder = shutil.copytree(native_folder(saved, case.kind, BELOW[case.kind][0]), tmp_path / SAVED_IN[case.kind])
    case.spoil(folder)
    require_refused(store, folder, case)


@pytest.mark.parametrize(("trainer", "name"), [("transformers", "rng_state_0.pth"), ("accelerate", "custom_checkpoint_0.pkl")])
def test_nothing_in_a_folder_is_run(saved: Path, store: Store, tmp_path: Path, trainer: str, name: str) -> None:
    folder = shutil.copytree(native_folder(saved, trainer, BELOW[trainer][0]), tmp_path / SAVED_IN[trainer])
    changed(folder / name, lambda content: content.update({"value" if trainer == "accelerate" else "cpu": Opens(tmp_path / "opened")}))
    require_not_run(store, folder, tmp_path / "opened")


def test_what_is_not_taken_is_said(saved: Path, store: Store, tmp_path: Path) -> None:
    folder = shutil.copytree(native_folder(saved, "transformers", "2,bf16"), tmp_path / "checkpoint-4")
    torch.save({}, folder / "mine.pt")
    skipped = import_checkpoint(store, folder, ref="runs/a").contents.skipped
    assert "does not read it" in skipped["mine.pt"]
    assert skipped["model.safetensors"] == "the weights are those of global_step4"
    result = tsck.export_snapshot(store, "runs/a", tmp_path / "out", format="deepspeed-universal")
    assert result.tensors > 10

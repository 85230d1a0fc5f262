"""Checkpoint folders of transformers' Trainer, from its own run: imported, exported again, and resumed from by the Trainer over a store."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import SeveralStepsError
from tests.cli.conftest import Tsck
from tests.cli.conftest import tsck as tsck_command
from tests.integrations.hf import runs
from tests.integrations.importing.conftest import Bring, Refuse
from tests.integrations.importing.same import require_same

command = tsck_command


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``output_dir`` of a run of transformers, with checkpoints 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("native") / "out"
    runs.native(folder).train()
    return folder


def _torch(path: Path) -> Any:
    return torch.load(path, weights_only=False)


def test_everything_in_it_is_imported(native: Path, bring: Bring) -> None:
    folder = native / "checkpoint-8"
    state, contents = bring(folder)
    require_same(state["model"], load_file(folder / "model.safetensors"))
    require_same(state["optimizer"], _torch(folder / "optimizer.pt"))
    require_same(state["scheduler"], _torch(folder / "scheduler.pt"))
    require_same(state["rng_state"], _torch(folder / "rng_state.pth"))
    assert state["trainer_state"] == json.loads((folder / "trainer_state.json").read_text())
    for name in ("config.json", "generation_config.json"):
        assert state["model_files"][name] == (folder / name).read_bytes()
    assert state.keys() == {"model", "optimizer", "scheduler", "rng_state", "trainer_state", "model_files"}
    assert contents.step == 8
    assert contents.format == "checkpoint folder of transformers' Trainer"
    assert list(contents.skipped) == ["training_args.bin"]


def test_a_folder_of_several_ranks_with_a_scaler_and_split_weights(native: Path, tmp_path: Path, bring: Bring) -> None:
    folder = tmp_path / "checkpoint-8"
    shutil.copytree(native / "checkpoint-8", folder)
    (folder / "rng_state.pth").rename(folder / "rng_state_0.pth")
    shutil.copy(folder / "rng_state_0.pth", folder / "rng_state_1.pth")
    torch.save(torch.amp.GradScaler("cpu").state_dict(), folder / "scaler.pt")
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    AutoModelForCausalLM.from_pretrained(native / "checkpoint-8").save_pretrained(folder, max_shard_size=2000)
    assert (folder / "model.safetensors.index.json").exists()
    trained = json.loads((folder / "trainer_state.json").read_text())
    trained["log_history"].append({"loss": float("nan"), "step": 8})
    (folder / "trainer_state.json").write_text(json.dumps(trained))
    state, contents = bring(folder)
    require_same(state["model"], weights)
    require_same(state["scaler"], _torch(folder / "scaler.pt"))
    assert {"rng_state_0", "rng_state_1"} <= state.keys()
    assert state["trainer_state"]["log_history"][-1]["loss"] != state["trainer_state"]["log_history"][-1]["loss"]
    assert list(contents.skipped) == ["training_args.bin"]


def test_training_arguments_are_skipped_with_a_notice(native: Path, tmp_path: Path, command: Tsck) -> None:
    (tmp_path / "saved").mkdir()
    for name in ("model.safetensors", "config.json", "training_args.bin"):
        shutil.copy(native / "checkpoint-8" / name, tmp_path / "saved")
    assert command("init", "ck").code == 0
    result = command("import", "saved", "--ref", "x")
    assert result.code == 0, result.err
    assert "skipped: training_args.bin (the TrainingArguments, a pickled object; nothing in a checkpoint is run)" in result.out
    assert command("import", "saved/training_args.bin", "--ref", "y").code == 24


def test_an_output_folder_is_a_history(native: Path, command: Tsck, tmp_path: Path) -> None:
    assert command("init", "ck").code == 0
    refused = command("import", str(native), "--ref", "x")
    assert refused.code == 26
    assert f"tsck import --history '{native}/*' --step-from name --ref x" in refused.err
    assert "--as-one" not in refused.err
    metric = ("--metric", "rate=key:trainer_state.log_history.0.learning_rate")
    for step_from in ("name", "key:trainer_state.global_step"):
        result = command("import", "--history", f"{native}/checkpoint-*", "--step-from", step_from, "--ref", f"x-{step_from[:3]}", *metric)
        assert result.code == 0, result.err
    with tsck.open(tmp_path / "ck", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert [each.step for each in store.log("x-key")] == [12, 8, 4]
        assert store.log("x-key")[0].metrics.keys() == {"rate"}
    result = command("export", "x-nam@8", "--to", "hf", "model")
    assert "tried: GPT2LMHeadModel.from_pretrained loads it, with every weight" in result.out
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    runs.assert_equal(model.state_dict(), AutoModelForCausalLM.from_pretrained(native / "checkpoint-8").state_dict())


def test_folders_that_are_refused(native: Path, tmp_path: Path, refuse: Refuse) -> None:
    assert "checkpoint-12: 12" in refuse(native, SeveralStepsError, as_one=True)
    one = tmp_path / "one"
    shutil.copytree(native / "checkpoint-8", one / "checkpoint-8")
    assert str(one / "checkpoint-8") in refuse(one, tsck.NotFoundError)
    folder = one / "checkpoint-8"
    for text, what in (("{", "cannot be read"), ('{"global_step": -1}', "no global_step"), ("[]", "no global_step")):
        (folder / "trainer_state.json").write_text(text)
        assert what in refuse(folder, tsck.CorruptObjectError)
    light = tmp_path / "light"
    light.mkdir()
    (light / "trainer_state.json").write_text('{"global_step": 3}')
    (light / "snapshot.json").write_text("{}")
    assert "the weights are in the store that this file names" in refuse(light, tsck.NotFoundError)


@pytest.mark.slow
def test_the_trainer_over_a_store_resumes_from_an_imported_snapshot(native: Path, tmp_path: Path, store: tsck.Store) -> None:
    """As transformers resumes from the folder."""
    tsck.import_history(store, str(native / "checkpoint-[48]"), ref=runs.REF, step_from="name")
    expected = runs.native(tmp_path / "native")
    expected.train(resume_from_checkpoint=str(native / "checkpoint-8"))
    resumed = runs.over_store(tmp_path / "out", store)
    resumed.train(resume_from_checkpoint=True)
    assert runs.losses(resumed) == runs.losses(expected)
    runs.assert_equal(runs.weights(resumed), runs.weights(expected))
    assert [each.step for each in store.log(runs.REF)] == [12, 8, 4]
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["checkpoint-12"]


def test_a_snapshot_of_something_else_is_refused(tmp_path: Path, store: tsck.Store) -> None:
    store.put_snapshot({"model": torch.ones(2)}, ref="other")
    with pytest.raises(tsck.MismatchError, match=r"was not saved by TrainingState\.put"):
        runs.over_store(tmp_path / "out", store).train(resume_from_checkpoint="other")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_an_adapter(tmp_path: Path, store: tsck.Store) -> None:
    base = runs.parts(tmp_path / "out")["model"]
    base.save_pretrained(tmp_path / "base")

    def run(kind: Any, folder: Path, **options: Any) -> Any:
        given = runs.parts(folder, save_steps=6)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
        return kind(**{**given, "model": peft.get_peft_model(model, config)}, **options)

    whole = run(transformers.Trainer, tmp_path / "native")
    whole.train()
    tsck.import_checkpoint(store, tmp_path / "native" / "checkpoint-6", ref=runs.REF)
    tsck.export_snapshot(store, runs.REF, tmp_path / "adapter", format="hf")
    ours, native = (
        peft.load_peft_weights(str(path), device="cpu") for path in (tmp_path / "adapter", tmp_path / "native" / "checkpoint-6")
    )
    runs.assert_equal(ours, native)
    resumed = run(tsck.hf.Trainer, tmp_path / "out", store=store, ref=runs.REF)
    resumed.train(resume_from_checkpoint=True)
    runs.assert_equal(runs.weights(resumed), runs.weights(whole))

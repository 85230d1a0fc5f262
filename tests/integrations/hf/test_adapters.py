"""Adapters of peft: snapshots hold the adapter, and refer to the base by name and hash, or store it where the user says so."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from peft import LoraConfig, get_peft_model
from transformers import GPT2LMHeadModel, TrainerCallback

import tensorstore_ck as tsck
from tensorstore_ck.cli import main
from tensorstore_ck.integrations import hf
from tests.integrations.hf import runs

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")]  # peft


def _snapshot_steps(store: tsck.Store) -> list[int]:
    return sorted(each.step or 0 for each in store.log(runs.REF))


def _adapted(folder: Path, **options: Any) -> dict[str, Any]:
    """The arguments of a Trainer that trains an adapter of peft."""
    given = runs.parts(folder, **options)
    given["model"].config.n_embd = 64  # so that the base has far more bytes than all else
    wide = GPT2LMHeadModel(given["model"].config)
    given["model"] = get_peft_model(wide, LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True))
    return given


@pytest.mark.parametrize("options", [{}, {"save_base": True}, {"frozen_base": True}])
def test_adapters_of_peft_resume(tmp_path: Path, store: tsck.Store, options: dict[str, bool]) -> None:
    def run(folder: Path, kill_after: int | None = None) -> hf.Trainer:
        callbacks = [] if kill_after is None else [runs.KillAfter(kill_after)]
        return hf.Trainer(**_adapted(folder), callbacks=callbacks, store=store, ref=folder.name, **options)

    whole = run(tmp_path / "whole")
    whole.train()
    with pytest.raises(runs.Killed):
        run(tmp_path / "cut", kill_after=9).train()
    store.drain()
    resumed = run(tmp_path / "cut")
    resumed.train(resume_from_checkpoint=True)
    assert runs.losses(resumed) == runs.losses(whole)
    runs.assert_equal(runs.weights(resumed), runs.weights(whole))


def _saved_model(store: tsck.Store) -> list[str]:
    with store.open_snapshot(runs.REF) as found:
        return [name for name in found.names() if name.startswith("model.")]


def test_a_snapshot_holds_what_peft_saves_and_refers_to_the_base(
    tmp_path: Path, store: tsck.Store, caplog: pytest.LogCaptureFixture
) -> None:
    given = _adapted(tmp_path / "out")
    given["model"].config._name_or_path = str(tmp_path / "base")
    given["model"].add_adapter("second", LoraConfig(r=3, target_modules=["c_proj"], fan_in_fan_out=True))  # never trained
    hf.Trainer(**given, store=store, ref=runs.REF).train()
    names = _saved_model(store)
    assert {"default", "second"} == {name.split(".")[-2] for name in names}
    assert all("lora_" in name for name in names)
    base = store.metadata(runs.REF)["base_model"]
    assert base["bytes"] == sum(each.nbytes for name, each in given["model"].named_parameters() if "lora_" not in name)
    [line] = [record.getMessage() for record in caplog.records if record.name == "tensorstore_ck.hf"]
    assert "hold the adapter alone" in line
    assert str(tmp_path / "base") in line
    assert "save_base=True" in line


def test_what_of_the_base_is_trained_or_resized_is_stored(tmp_path: Path, store: tsck.Store) -> None:
    """A module that peft saves whole, a parameter that the script trains, and an embedding that is larger than the base's."""
    GPT2LMHeadModel(runs.parts(tmp_path)["model"].config).save_pretrained(tmp_path / "base")
    given = runs.parts(tmp_path / "out")
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "base")
    model.resize_token_embeddings(53)
    given["model"] = get_peft_model(
        model, LoraConfig(r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    )
    given["model"].get_parameter("base_model.model.transformer.h.0.ln_1.bias").requires_grad_(True)
    hf.Trainer(**given, store=store, ref=runs.REF).train()
    names = {name.removeprefix("model.base_model.model.") for name in _saved_model(store) if "lora_" not in name}
    assert names == {
        "transformer.h.0.ln_1.bias",
        "transformer.ln_f.modules_to_save.default.bias",
        "transformer.ln_f.modules_to_save.default.weight",
        "transformer.wte.weight",
        "lm_head.weight",
    }
    assert store.metadata(runs.REF)["base_model"]["name"] == str(tmp_path / "base")


@pytest.mark.parametrize("save_base", [False, True])
def test_a_resume_on_another_base_is_an_error(tmp_path: Path, store: tsck.Store, save_base: bool) -> None:
    """And nothing is restored, whatever the resumed run would store."""
    hf.Trainer(**_adapted(tmp_path / "out"), store=store, ref=runs.REF).train()
    given = _adapted(tmp_path / "out")
    with torch.no_grad():
        given["model"].get_parameter("base_model.model.transformer.ln_f.weight")[3] += 0.5
    before = {name: each.clone() for name, each in given["model"].state_dict().items()}
    trainer = hf.Trainer(**given, store=store, ref=runs.REF, save_base=save_base)
    with pytest.raises(tsck.MismatchError, match="holds an adapter of another base") as caught:
        trainer.train(resume_from_checkpoint="auto")
    runs.assert_equal(runs.weights(trainer), before)
    (printed,) = re.findall("`tsck (export [^`]+)`", str(caught.value))
    exported = tmp_path / "exported"
    assert CliRunner().invoke(main, shlex.split(printed.replace("DIR", str(exported)))).exit_code == 0
    assert (exported / "adapter_config.json").exists()


def test_runs_that_store_the_base_and_runs_that_refer_to_it_continue_each_other(tmp_path: Path, store: tsck.Store) -> None:
    whole = hf.Trainer(**_adapted(tmp_path / "whole"), store=store, ref="whole")
    whole.train()
    for steps, save_base in ((4, True), (8, False), (12, True)):
        given = _adapted(tmp_path / "out", max_steps=steps, lr_scheduler_type="constant")
        trainer = hf.Trainer(**given, store=store, ref=runs.REF, save_base=save_base)
        trainer.train(resume_from_checkpoint="auto")
        assert len(_saved_model(store)) == (len(trainer.model.state_dict()) if save_base else 2)
    straight = hf.Trainer(**_adapted(tmp_path / "s", lr_scheduler_type="constant"), store=store, ref="straight")
    straight.train()
    runs.assert_equal(runs.weights(trainer), runs.weights(straight))


class _ChangeBase(TrainerCallback):  # type: ignore[misc]
    """Changes a parameter of the base after step 5, as a script can, or begins to train it."""

    def __init__(self, how: str) -> None:
        self._how = how

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weight = kwargs["model"].get_parameter("base_model.model.transformer.ln_f.weight")
        if state.global_step == 5 and self._how == "changed":
            with torch.no_grad():
                weight.fill_(7)
        elif state.global_step == 5:
            weight.requires_grad_(True)


def test_a_frozen_base_is_read_at_the_first_save_only(tmp_path: Path, store: tsck.Store) -> None:
    hashed: list[int] = []
    store.on_event(lambda event: hashed.append(int(event.fields["hashed_bytes"])) if event.kind == "published" else None)
    trainer = hf.Trainer(**_adapted(tmp_path / "out", save_steps=2), store=store, ref=runs.REF, frozen_base=True)
    base = sum(each.nbytes for each in trainer.model.parameters() if not each.requires_grad)
    trainer.train()
    assert hashed[0] > base
    assert all(each < base for each in hashed[1:])
    assert len(hashed) == 6
    found = store.checkout(runs.REF, select=["model.*"])["model"]
    runs.assert_equal(found, runs.weights(trainer))


@pytest.mark.parametrize("how", ["changed", "trained"])
@pytest.mark.parametrize(("option", "said"), [("frozen_base", "frozen_base"), ("on_exception", "save_base=True")])
def test_a_base_that_changes_is_an_error(tmp_path: Path, store: tsck.Store, how: str, option: str, said: str) -> None:
    """A frozen one, and one that snapshots refer to."""
    callbacks = [_ChangeBase(how)]
    given = _adapted(tmp_path / "out", save_steps=2)
    trainer = hf.Trainer(**given, callbacks=callbacks, store=store, ref=runs.REF, asynchronous=False, **{option: True})
    with pytest.raises(tsck.errors.FrozenChangedError, match=rf"ln_f\.weight .* {said}"):
        trainer.train()
    assert _snapshot_steps(store) == [2, 4]
    if option != "frozen_base":
        return
    weight = store.checkout(runs.REF)["model"]["base_model.model.transformer.ln_f.weight"]
    assert torch.equal(weight, torch.ones_like(weight))

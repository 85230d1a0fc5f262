"""transformers' Trainer over a store: what a script sees that changed one line."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tests.effort import effort
from tests.integrations.conftest import has_finished
from tests.integrations.hf import runs
from tests.integrations.hf.conftest import Undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")]  # peft


def _snapshot_steps(store: tsck.Store) -> list[int]:
    return sorted(each.step or 0 for each in store.log(runs.REF))


def test_a_run_over_a_store_trains_as_a_native_one(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    trainer = runs.over_store(tmp_path / "out", store)
    trainer.train()
    assert runs.losses(trainer) == undisturbed.losses
    runs.assert_equal(runs.weights(trainer), undisturbed.weights)
    assert _snapshot_steps(store) == [4, 8, 12]
    assert has_finished(store)
    newest = store.show(runs.REF)
    assert newest.snapshot.metrics["loss"] == runs.losses(trainer)[-1][1]
    folders = sorted(each.name for each in (tmp_path / "out").iterdir())
    assert folders == ["checkpoint-12", "checkpoint-4", "checkpoint-8"]
    assert {each.name for each in (tmp_path / "out" / "checkpoint-8").iterdir()} == {"trainer_state.json", "snapshot.json"}


@pytest.mark.parametrize(("killed_after", "asynchronous"), [(5, True), (8, False), (9, True), (11, False)])
def test_a_resume_is_bit_for_bit_the_undisturbed_run(
    tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed, killed_after: int, asynchronous: bool
) -> None:
    """In the first epoch and in the second, right after a save and between two logs: also the losses that are logged.

    The folders are not needed.
    """
    with pytest.raises(runs.Killed):
        runs.over_store(tmp_path / "out", store, kill_after=killed_after, asynchronous=asynchronous).train()
    store.drain()
    if killed_after > 8:
        shutil.rmtree(tmp_path / "out")
    resumed = runs.over_store(tmp_path / "out", store, asynchronous=asynchronous)
    resumed.train(resume_from_checkpoint=True)
    assert runs.losses(resumed) == undisturbed.losses
    runs.assert_equal(runs.weights(resumed), undisturbed.weights)


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (2, False), (2, True)])
def test_the_order_of_every_cut(tmp_path: Path, store: tsck.Store, workers: int, persistent: bool) -> None:
    options: dict[str, Any] = {"dataloader_num_workers": workers, "dataloader_persistent_workers": persistent, "max_steps": 22}
    options["logging_steps"] = 1
    whole = runs.over_store(tmp_path / "out", store, save_steps=1, **options)
    whole.train()
    for done in effort([1, 10, 11, 20], [*range(1, 22)]):
        resumed = runs.over_store(tmp_path / "more", store, save_strategy="no", **options)
        resumed.train(resume_from_checkpoint=f"{runs.REF}@{done}")
        assert runs.losses(resumed)[done:] == runs.losses(whole)[done:]
        runs.assert_equal(runs.weights(resumed), runs.weights(whole))


def test_a_given_folder_whose_save_was_never_published(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    """As `get_last_checkpoint` finds it after a kill: the run continues from the snapshot before."""
    with pytest.raises(runs.Killed):
        runs.over_store(tmp_path, store, kill_after=7, asynchronous=False).train()
    folder = tmp_path / "checkpoint-8"
    shutil.copytree(tmp_path / "checkpoint-4", folder)
    (folder / "snapshot.json").write_text(json.dumps({"store": store.url, "address": f"{runs.REF}@8", "run": "1-0"}))
    resumed = runs.over_store(tmp_path, store)
    with pytest.warns(UserWarning, match="resuming from runs/a@4"):
        resumed.train(resume_from_checkpoint=str(folder))
    runs.assert_equal(runs.weights(resumed), undisturbed.weights)


class FailIn(TrainerCallback):  # type: ignore[misc]
    """Fails at step 5, in one of the callbacks."""

    def __init__(self, event: str) -> None:
        setattr(self, event, self._fail)

    def _fail(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            raise runs.Killed


@pytest.mark.parametrize(("event", "saved"), [("on_evaluate", 5), ("on_pre_optimizer_step", 4), ("on_step_begin", 4)])
def test_an_exception_between_two_steps_saves(tmp_path: Path, store: tsck.Store, event: str, saved: int) -> None:
    """And never within a step: `on_step_begin` comes when its batches are read."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 5}  # an evaluation draws a number
    whole = runs.native(tmp_path / "whole", **options)
    whole.train()
    trainer = runs.over_store(tmp_path, store, asynchronous=False, **options)
    trainer.add_callback(FailIn(event))
    with pytest.raises(runs.Killed) as caught:
        trainer.train()
    assert store.resolve(runs.REF).step == saved
    assert getattr(caught.value, "__notes__", []) == ["tensorstore_ck: step 5, the last completed one, was saved"][: saved - 4]
    resumed = runs.over_store(tmp_path, store, **options)
    resumed.train(resume_from_checkpoint=True)
    runs.assert_equal(runs.weights(resumed), runs.weights(whole))


@pytest.mark.parametrize("form", ["address", "folder"])
def test_a_resume_from_an_earlier_step(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed, form: str) -> None:
    runs.over_store(tmp_path / "out", store).train()
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as another:
        resumed = runs.over_store(tmp_path / "more", another)
        resumed.train(resume_from_checkpoint=f"{runs.REF}@4" if form == "address" else str(tmp_path / "out" / "checkpoint-4"))
    if form == "folder":
        assert sorted(each.name for each in (tmp_path / "more").iterdir()) == ["checkpoint-12", "checkpoint-8"]
    assert runs.losses(resumed) == undisturbed.losses
    runs.assert_equal(runs.weights(resumed), undisturbed.weights)


def test_a_folder_of_transformers_is_resumed_as_before(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    runs.native(tmp_path / "out").train()
    resumed = runs.over_store(tmp_path / "out", store)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-8"))
    runs.assert_equal(runs.weights(resumed), undisturbed.weights)
    assert _snapshot_steps(store) == [12]


def test_true_skips_folders_that_a_kill_left_incomplete(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    trainer = runs.native(tmp_path)
    trainer.add_callback(runs.KillAfter(9))
    with pytest.raises(runs.Killed):
        trainer.train()
    (tmp_path / "checkpoint-12").mkdir()
    torn = tmp_path / "checkpoint-16"
    shutil.copytree(tmp_path / "checkpoint-8", torn)
    (torn / "trainer_state.json").unlink()
    resumed = runs.over_store(tmp_path, store)
    resumed.train(resume_from_checkpoint=True)
    runs.assert_equal(runs.weights(resumed), undisturbed[1])


def test_a_light_folder_that_a_kill_left_without_its_state_is_resumed_from(
    tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed
) -> None:
    with pytest.raises(runs.Killed):
        runs.over_store(tmp_path, store, kill_after=9).train()
    folder = tmp_path / "checkpoint-8"
    (folder / "trainer_state.json").unlink()
    resumed = runs.over_store(tmp_path, store)
    resumed.train(resume_from_checkpoint=str(folder))
    runs.assert_equal(runs.weights(resumed), undisturbed[1])


def test_the_best_model_is_loaded_at_the_end_and_limits_hold(tmp_path: Path, store: tsck.Store) -> None:
    """The worst counts as the best here, so that it is not the newest."""
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_steps": 2,
        "load_best_model_at_end": True,
        "save_total_limit": 2,
    }
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}
    one = runs.native(tmp_path / "native", **options)
    one.train()
    best = one.state.best_global_step
    assert best is not None
    assert best < runs.STEPS
    ours = runs.over_store(tmp_path / "out", store, **options)
    ours.train()
    assert ours.state.best_global_step == best
    assert Path(ours.state.best_model_checkpoint or "").name == f"checkpoint-{best}"
    runs.assert_equal(runs.weights(ours), runs.weights(one))
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == sorted(each.name for each in (tmp_path / "native").iterdir())
    assert {best, runs.STEPS} <= set(_snapshot_steps(store))
    assert len(_snapshot_steps(store)) == 3


def test_the_best_model_is_loaded_on_a_host_without_the_folders(tmp_path: Path, store: tsck.Store) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True, "save_total_limit": 2}
    whole = runs.native(tmp_path / "native", **options)
    whole.train()
    with pytest.raises(runs.Killed):
        runs.over_store(tmp_path / "one", store, kill_after=9, **options).train()
    store.drain()
    resumed = runs.over_store(tmp_path / "other", store, **options)
    resumed.train(resume_from_checkpoint=True)
    best = whole.state.best_global_step
    assert resumed.state.best_global_step == best is not None
    assert Path(resumed.state.best_model_checkpoint or "").name == f"checkpoint-{best}"
    runs.assert_equal(runs.weights(resumed), runs.weights(whole))


def test_a_limit_of_snapshots_bounds_their_bytes(tmp_path: Path, store: tsck.Store) -> None:
    # A wide model: else the log would take half of the store, and the number of its entries depends on timing.
    trainer = runs.over_store(tmp_path / "out", store, width=64, save_steps=1, save_total_limit=2, max_steps=30)
    trainer.train()
    assert _snapshot_steps(store) == [29, 30]
    usage = store.usage()
    assert usage.undo_bytes == 0
    assert usage.objects_bytes < 2.5 * usage.stored_bytes


def test_a_finished_run_that_is_resumed_loads_the_best_model(tmp_path: Path, store: tsck.Store) -> None:
    """It saves nothing, since no evaluation is better than the best so far."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 4, "load_best_model_at_end": True}
    options |= {"metric_for_best_model": "loss", "greater_is_better": True}
    finished = runs.over_store(tmp_path / "out", store, **options)
    finished.train()
    resumed = runs.over_store(tmp_path / "out", store, **options, save_strategy="best")
    resumed.train(resume_from_checkpoint=True)
    assert len(store.log(runs.REF)) == 3
    assert resumed.state.best_global_step == finished.state.best_global_step != runs.STEPS
    runs.assert_equal(runs.weights(resumed), runs.weights(finished))


def test_a_folder_of_another_store_is_refused(tmp_path: Path, store: tsck.Store) -> None:
    runs.over_store(tmp_path / "out", store).train()
    light = tmp_path / "out" / "checkpoint-4"
    light.joinpath("snapshot.json").write_text(json.dumps({"store": "/elsewhere", "address": f"{runs.REF}@8"}))
    with pytest.raises(tsck.MismatchError, match="names a snapshot of /elsewhere"):
        runs.over_store(tmp_path / "out", store).train(resume_from_checkpoint=str(light))


def test_a_process_goes_on_after_its_own_snapshots(tmp_path: Path, store: tsck.Store) -> None:
    for _ in range(2):
        runs.over_store(tmp_path / "out", store, max_steps=4).train()
    assert len(store.log(runs.REF)) == 2


def test_a_folder_whose_save_was_never_published_is_no_checkpoint(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    """As a kill leaves it that comes before the first save in the background has ended."""
    runs.native(tmp_path / "out", save_steps=8).train()
    shutil.rmtree(tmp_path / "out" / "checkpoint-12")
    light = tmp_path / "out" / "checkpoint-12"
    light.mkdir()
    (light / "snapshot.json").write_text(json.dumps({"store": store.url, "address": f"{runs.REF}@12"}))
    resumed = runs.over_store(tmp_path / "out", store)
    resumed.train(resume_from_checkpoint=True)
    runs.assert_equal(runs.weights(resumed), undisturbed.weights)


def test_an_existing_trainer_of_a_subclass_is_attached(tmp_path: Path, undisturbed: Undisturbed) -> None:
    class Own(transformers.Trainer):  # type: ignore[misc]
        pass

    trainer = Own(**runs.parts(tmp_path / "out"))
    hf.attach(trainer, store=tmp_path / "store", ref=runs.REF)
    assert isinstance(trainer, Own)
    trainer.train()
    assert runs.losses(trainer) == undisturbed.losses
    pointer = json.loads((tmp_path / "out" / "checkpoint-12" / "snapshot.json").read_text())
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        assert pointer == {"store": store.url, "address": store.resolve(runs.REF).root}
    with pytest.raises(tsck.InvalidOptionError, match="already"):
        hf.attach(trainer, store=tmp_path / "store", ref=runs.REF)
    trainer._store.close()


def test_another_version_of_transformers_is_refused(tmp_path: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(transformers, "__version__", "6.1.0")
        with pytest.raises(tsck.MissingExtraError, match=r"transformers 6\.1\.0 is not supported"):
            runs.over_store(tmp_path / "out", store)
    monkeypatch.setattr(transformers.Trainer, "_load_scaler", lambda self: None)
    with pytest.raises(tsck.MissingExtraError, match="_load_scaler"):
        runs.over_store(tmp_path / "out", store)


class _Journal(GPT2LMHeadModel):  # type: ignore[misc]
    """Has a buffer that grows with each step, and a `load_state_dict` of its own that lets it grow."""

    journal: torch.Tensor

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.register_buffer("journal", torch.empty(0))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        self.journal = torch.cat([self.journal, input_ids[:1, 0].float()])
        return super().forward(input_ids=input_ids, labels=labels)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self.journal = state["journal"].clone()
        return super().load_state_dict(state, strict, assign)


def test_a_model_takes_its_weights_by_its_own_method(tmp_path: Path, store: tsck.Store) -> None:
    def run(name: str, kill_after: int | None = None) -> hf.Trainer:
        given = runs.parts(tmp_path / name)
        given["model"] = _Journal(given["model"].config)
        callbacks = [] if kill_after is None else [runs.KillAfter(kill_after)]
        return hf.Trainer(**given, callbacks=callbacks, store=store, ref=name)

    whole = run("whole")
    whole.train()
    with pytest.raises(runs.Killed):
        run("cut", kill_after=9).train()
    store.drain()
    resumed = run("cut")
    resumed.train(resume_from_checkpoint=True)
    assert len(resumed.model.journal) == runs.STEPS
    runs.assert_equal(runs.weights(resumed), runs.weights(whole))


def test_what_does_not_exist_is_reported_as_by_transformers(tmp_path: Path, store: tsck.Store) -> None:
    """Scripts look for these words."""
    for missing, said in ((str(tmp_path / "out" / "checkpoint-5"), "Can't find a valid checkpoint at"), ("runs/other@4", "runs/other")):
        with pytest.raises(tsck.NotFoundError, match=said):
            runs.over_store(tmp_path / "out", store).train(resume_from_checkpoint=missing)
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory") as nothing:
        runs.over_store(tmp_path / "out", store).train(resume_from_checkpoint=True)
    assert isinstance(nothing.value, tsck.NotFoundError)
    assert [Path(entry.path).name for entry in nothing.traceback] == ["test_trainer.py"], "no frames of the package"


def test_one_call_starts_a_run_and_continues_it(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    """The first start, a second one after a kill, and a third one after the end."""
    with pytest.raises(runs.Killed):
        runs.over_store(tmp_path / "out", store, kill_after=9).train(resume_from_checkpoint="auto")
    store.drain()
    for _ in range(2):
        with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as another:
            resumed = runs.over_store(tmp_path / "out", another)
            resumed.train(resume_from_checkpoint="auto")
        runs.assert_equal(runs.weights(resumed), undisturbed.weights)
    assert _snapshot_steps(store) == [4, 8, 12]


def test_auto_continues_a_run_of_transformers(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    trainer = runs.native(tmp_path)
    trainer.add_callback(runs.KillAfter(9))
    with pytest.raises(runs.Killed):
        trainer.train()
    resumed = runs.over_store(tmp_path, store)
    resumed.train(resume_from_checkpoint="auto")
    runs.assert_equal(runs.weights(resumed), undisturbed.weights)
    assert _snapshot_steps(store) == [12]


def test_a_finished_run_that_is_resumed_trains_no_further_step(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    """As after a kill that came after the last save. transformers would go on, since the run ended within an epoch."""
    runs.over_store(tmp_path / "out", store).train()
    resumed = runs.over_store(tmp_path / "out", store)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == runs.STEPS
    assert runs.losses(resumed) == undisturbed.losses
    runs.assert_equal(runs.weights(resumed), undisturbed.weights)


def test_fsdp1_and_a_frozen_base_with_deepspeed_are_refused(tmp_path: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as this shows without GPUs: accelerate turns neither on here."""
    trainer = runs.native(tmp_path / "out")
    monkeypatch.setattr(trainer.accelerator.state, "fsdp_plugin", FullyShardedDataParallelPlugin(fsdp_version=1), raising=False)
    with pytest.raises(tsck.InvalidOptionError, match="FSDP version 1"):
        hf.attach(trainer, store=store, ref=runs.REF)
    monkeypatch.undo()
    trainer = runs.native(tmp_path / "out")
    trainer.is_deepspeed_enabled = True
    with pytest.raises(tsck.InvalidOptionError, match="DeepSpeed"):
        hf.attach(trainer, store=store, ref=runs.REF, frozen_base=True)

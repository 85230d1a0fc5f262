"""Lightning's Trainer over a store: what a script sees that changed one line."""

import json
import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

import tensorstore_ck as tsck
from tests.effort import effort
from tests.integrations.conftest import has_finished
from tests.integrations.lightning import runs
from tests.integrations.lightning.conftest import QUIET, Undisturbed

pytestmark = [pytest.mark.slow, *QUIET]


LIMITED: dict[str, Any] = {"max_steps": 13, "max_epochs": -1}


class Own:
    """No value that a store knows."""


def _fit(folder: Path, saves: Any, ckpt_path: str | None = None, kill_after: int | None = None, **options: Any) -> Any:
    """A run, with its module."""
    module = runs.seeded()
    callbacks = [saves] if kill_after is None else [runs.KillAfter(kill_after), saves]
    trainer = runs.trainer(folder, *callbacks, **options)
    if kill_after is None:
        trainer.fit(module, ckpt_path=ckpt_path)
    else:
        with pytest.raises(runs.Killed):
            trainer.fit(module, ckpt_path=ckpt_path)
    return trainer


def _steps(store: tsck.Store, ref: str = runs.REF) -> list[int]:
    return sorted(each.step or 0 for each in store.log(ref))


def _assert_continues(killed: Any, resumed: Any, undisturbed: Undisturbed) -> None:
    """Together both runs logged all that the undisturbed run did, and the second one ends as that one, bit for bit."""
    logged = runs.logged(resumed)
    assert logged == undisturbed.logged[-len(logged) :]
    assert [entry for entry in undisturbed.logged if entry not in runs.logged(killed) + logged] == []
    module = resumed.lightning_module
    assert module.seen == undisturbed.seen[-len(module.seen) :]
    runs.assert_equal(runs.weights(module), undisturbed.weights)


def test_a_run_over_a_store_trains_as_a_native_one(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    trainer = _fit(tmp_path, runs.checkpoint(tmp_path, store))
    assert runs.logged(trainer) == undisturbed.logged
    runs.assert_equal(runs.weights(trainer.lightning_module), undisturbed.weights)
    assert _steps(store) == [3, 6, 9, 12, 15]
    assert has_finished(store)
    assert sorted(each.name for each in (tmp_path / "files").iterdir()) == [f"step={step}.ckpt" for step in (12, 15, 3, 6, 9)]
    pointer = json.loads((tmp_path / "files" / "step=6.ckpt").read_text())
    assert pointer == {"store": store.url, "address": store.resolve(f"{runs.REF}@6").root}
    assert store.show(f"{runs.REF}@6").snapshot.metrics["loss_step"] == dict(undisturbed.logged)[5]["loss_step"]


@pytest.mark.parametrize(
    ("kill_after", "asynchronous", "options"),
    [
        pytest.param(4, True, {"every_n_train_steps": 1}, id="within the first epoch"),
        pytest.param(8, False, {"every_n_train_steps": 3}, id="between two saves"),
        pytest.param(6, True, {"every_n_train_steps": 1}, id="after the first batch of an epoch"),
        pytest.param(5, False, {"every_n_train_steps": 5}, id="at the end of an epoch"),
        pytest.param(13, True, {"every_n_train_steps": None, "every_n_epochs": 1}, id="a save at each epoch"),
        pytest.param(7, False, {"when": tsck.every_steps(2)}, id="a trigger of the store"),
    ],
)
def test_a_resume_is_bit_for_bit_the_undisturbed_run(  # noqa: PLR0917 - fixtures and parameters
    tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed, kill_after: int, asynchronous: bool, options: dict[str, Any]
) -> None:
    """Data, weights, moments, schedules that watch a value, means over an epoch."""
    killed = _fit(tmp_path, runs.checkpoint(tmp_path, store, asynchronous=asynchronous, **options), kill_after=kill_after)
    resumed = _fit(tmp_path, runs.checkpoint(tmp_path, store, asynchronous=asynchronous, **options), "last")
    _assert_continues(killed, resumed, undisturbed)
    if "when" in options:
        assert _steps(store) == [2, 4, 6, 8, 10, 12, 14]


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "evaluations within an epoch": ({"val_check_interval": 0.4}, {}),
    "two batches for a step": ({"accumulate_grad_batches": 2}, {}),
    "a limit of steps": (LIMITED, {}),
    "a limit of steps, a loader that saves its position": (LIMITED, {"loader": StatefulDataLoader}),
    "loaders with workers": ({}, {"workers": 2}),
    "loaders with workers for all passes": ({}, {"workers": 2, "loader": runs.persistent}),
    "a loader without a length": ({}, {"loader": runs.streamed}),
    "a schedule for every second epoch": ({"max_epochs": 4}, {"frequency": 2}),
}
"""Of the Trainer, and of the module."""
KILLS = [5, 3, 12, 2, 7, 4, 10, 6]
STRUCK = [(kind, kill) for number, kind in enumerate(OPTIONS) for kill in effort([KILLS[number % 3], KILLS[(number + 1) % 3]], KILLS)]


@pytest.mark.parametrize(("kind", "kill_after"), STRUCK)
def test_a_resume_after_every_step(tmp_path: Path, store: tsck.Store, kind: str, kill_after: int) -> None:
    options, module_options = OPTIONS[kind]

    def fit(*callbacks: Any, ckpt_path: str | None = None) -> Any:
        module = runs.seeded(**module_options)
        trainer = runs.trainer(tmp_path, *callbacks, **options, enable_checkpointing=bool(callbacks))
        try:
            trainer.fit(module, ckpt_path=ckpt_path)
        except runs.Killed:
            assert ckpt_path is None
        return trainer

    whole = fit()
    undisturbed = Undisturbed(runs.logged(whole), runs.weights(whole.lightning_module), whole.lightning_module.seen)
    saves = {"every_n_train_steps": 1}
    killed = fit(runs.KillAfter(kill_after), runs.checkpoint(tmp_path, store, **saves))
    resumed = fit(runs.checkpoint(tmp_path, store, **saves), ckpt_path="last")
    if killed.global_step == whole.global_step:  # it ended before the kill
        assert (resumed.global_step, resumed.lightning_module.seen) == (whole.global_step, [])
    else:
        _assert_continues(killed, resumed, undisturbed)


def test_a_save_that_is_due_between_the_batches_of_a_step_comes_after_it(tmp_path: Path, store: tsck.Store) -> None:
    class Due(Callback):  # type: ignore[misc]
        """The clock of `train_time_interval`."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if (trainer.global_step, trainer.fit_loop.batch_idx) == (1, 2):
                saves._last_time_checked = float("-inf")

    saves = runs.checkpoint(tmp_path, store, every_n_train_steps=None, train_time_interval=timedelta(days=1))
    runs.trainer(tmp_path, Due(), saves, accumulate_grad_batches=2, max_epochs=1).fit(runs.seeded())
    assert _steps(store) == [2]


def test_a_run_that_ended_goes_on_with_more_steps(tmp_path: Path, store: tsck.Store) -> None:
    """With the higher limit the resumed run continues within the epoch that the former limit had ended."""
    saves: dict[str, Any] = {"every_n_train_steps": None, "every_n_epochs": 1}
    longer: dict[str, Any] = {"max_steps": 18, "max_epochs": 4}
    whole = _fit(tmp_path, ModelCheckpoint(tmp_path / "native"), **longer)
    undisturbed = Undisturbed(runs.logged(whole), runs.weights(whole.lightning_module), whole.lightning_module.seen)
    first = _fit(tmp_path, runs.checkpoint(tmp_path, store, **saves), **LIMITED)
    _assert_continues(first, _fit(tmp_path, runs.checkpoint(tmp_path, store, **saves), "last", **longer), undisturbed)


@pytest.mark.parametrize("form", ["address", "file"])
def test_a_resume_from_an_earlier_step(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed, form: str) -> None:
    _fit(tmp_path, runs.checkpoint(tmp_path, store))
    path = f"{runs.REF}@6" if form == "address" else str(tmp_path / "files" / "step=6.ckpt")
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as another:
        resumed = _fit(tmp_path, runs.checkpoint(tmp_path, another), path)
    assert runs.logged(resumed) == undisturbed.logged[-len(runs.logged(resumed)) :]
    runs.assert_equal(runs.weights(resumed.lightning_module), undisturbed.weights)


def test_the_best_and_the_last(tmp_path: Path, store: tsck.Store) -> None:
    """As ModelCheckpoint: the same files, and the same weights for a test."""
    options: dict[str, Any] = {"every_n_train_steps": None, "every_n_epochs": 1, "monitor": "val_loss", "mode": "max"}
    options |= {"save_top_k": 1, "save_last": True}
    native = ModelCheckpoint(tmp_path / "native", "{step}", **options)
    expected = _fit(tmp_path, native)
    saves = runs.checkpoint(tmp_path, store, **options)
    trainer = _fit(tmp_path, saves)
    assert {each.name for each in (tmp_path / "files").iterdir()} == {each.name for each in (tmp_path / "native").iterdir()}
    assert os.path.basename(saves.best_model_path) == os.path.basename(native.best_model_path) == "step=5.ckpt"
    assert saves.best_model_score == native.best_model_score
    assert {os.path.basename(path): value for path, value in saves.best_k_models.items()} == {"step=5.ckpt": saves.best_model_score}
    for one, path in ((trainer, "best"), (expected, "best")):
        one.validate(one.lightning_module, ckpt_path=path, verbose=False)
    runs.assert_equal(runs.weights(trainer.lightning_module), runs.weights(expected.lightning_module))
    assert store.resolve(f"{runs.REF}@5").step == 5
    assert trainer.checkpoint_callback is saves
    last = json.loads((tmp_path / "files" / "last.ckpt").read_text())
    assert last["address"] == store.resolve(runs.REF).root


def test_the_last_can_be_a_link(tmp_path: Path, store: tsck.Store) -> None:
    _fit(tmp_path, runs.checkpoint(tmp_path, store, save_last="link"), max_epochs=1)
    last = tmp_path / "files" / "last.ckpt"
    assert last.is_symlink()
    assert json.loads(last.read_text())["address"] == store.resolve(runs.REF).root


def test_a_limit_of_snapshots_bounds_names_and_bytes(tmp_path: Path, store: tsck.Store) -> None:
    """The newest snapshot that is not damaged stays beside the newest, as in every ref with a policy."""
    saves = runs.checkpoint(tmp_path, store, every_n_train_steps=1, save_top_k=1)
    # A wide model: else the log would take half of the store, and the number of its entries depends on timing.
    runs.trainer(tmp_path, saves, max_epochs=6, limit_val_batches=1).fit(runs.seeded(width=4096))
    assert [each.name for each in (tmp_path / "files").iterdir()] == ["step=30.ckpt"]
    assert _steps(store) == [29, 30]
    usage = store.usage()
    assert usage.undo_bytes == 0
    assert usage.objects_bytes < 2.5 * usage.stored_bytes


def test_a_checkpoint_of_lightning_is_loaded_as_before(tmp_path: Path, store: tsck.Store) -> None:
    native = ModelCheckpoint(tmp_path / "native", "{step}", every_n_train_steps=10)
    _fit(tmp_path, native, max_epochs=2)
    resumed = _fit(tmp_path, runs.checkpoint(tmp_path, store), native.best_model_path)
    assert resumed.lightning_module.seen[0][0] == 10
    assert _steps(store) == [12, 15]


def test_last_without_a_snapshot_starts_from_the_beginning(tmp_path: Path, store: tsck.Store, undisturbed: Undisturbed) -> None:
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        resumed = _fit(tmp_path, runs.checkpoint(tmp_path, store), "last")
    runs.assert_equal(runs.weights(resumed.lightning_module), undisturbed.weights)


def test_an_address_that_does_not_exist_is_an_error(tmp_path: Path, store: tsck.Store) -> None:
    for path in ("runs/other@4", f"{runs.REF}@4", "no/such/file.ckpt"):
        with pytest.raises(tsck.NotFoundError, match="is no file, and no snapshot of"):
            _fit(tmp_path, runs.checkpoint(tmp_path, store), path)


def test_files_that_do_not_fit_are_refused(tmp_path: Path, store: tsck.Store) -> None:
    file = tmp_path / "one.ckpt"
    file.write_text(json.dumps({"store": "/elsewhere", "address": f"{runs.REF}@8"}))
    with pytest.raises(tsck.MismatchError, match="names a snapshot of /elsewhere"):
        _fit(tmp_path, runs.checkpoint(tmp_path, store), str(file))
    file.write_text("{}")
    with pytest.raises(tsck.InputError, match="does not name a snapshot"):
        _fit(tmp_path, runs.checkpoint(tmp_path, store), str(file))
    store.put_snapshot({"model": {"a": torch.zeros(1)}}, ref="runs/other", step=1)
    with pytest.raises(tsck.MismatchError, match="was not saved by a trainer"):
        _fit(tmp_path, runs.checkpoint(tmp_path, store), "runs/other")


def test_hooks_that_change_the_weights_of_a_checkpoint_are_honoured(tmp_path: Path, store: tsck.Store) -> None:
    class Halved(runs.Model):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {name: each / 2 for name, each in checkpoint["state_dict"].items()}
            checkpoint["mine"] = 5

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.mine = checkpoint["mine"]

    trainer = runs.trainer(tmp_path, runs.checkpoint(tmp_path, store), max_epochs=1)
    trainer.fit(runs.seeded(Halved))
    trained = runs.weights(trainer.lightning_module)
    other = runs.seeded(Halved)
    trainer.validate(other, ckpt_path=f"{runs.REF}@3", verbose=False)
    assert other.mine == 5
    loaded = runs.weights(other)["net.0.weight"]
    assert not torch.equal(loaded, trained["net.0.weight"])
    with store.open_snapshot(f"{runs.REF}@3") as stored:
        assert torch.equal(torch.as_tensor(stored["model.net.0.weight"][:]) / 2, loaded)


def test_a_hyperparameter_that_cannot_be_stored_is_an_error_before_the_training(tmp_path: Path, store: tsck.Store) -> None:
    class Odd(runs.Model):
        def __init__(self, odd: Any) -> None:
            super().__init__()
            self.save_hyperparameters("odd")

    module = Odd(Own())
    with pytest.raises(tsck.UnsupportedValueError, match=r"hyper_parameters\.odd"):
        runs.trainer(tmp_path, runs.checkpoint(tmp_path, store)).fit(module)
    assert module.seen == []


def test_saves_that_fail_end_the_run(tmp_path: Path, store: tsck.Store) -> None:
    class Unstorable(Callback):  # type: ignore[misc]
        def state_dict(self) -> dict[str, Any]:
            return {"it": object()}

    with pytest.raises(tsck.UnsupportedValueError, match=r"lightning\.checkpoint\.callbacks"):
        runs.trainer(tmp_path, Unstorable(), runs.checkpoint(tmp_path, store)).fit(runs.seeded())


def test_arguments_that_contradict_each_other_are_refused(tmp_path: Path, store: tsck.Store) -> None:
    with pytest.raises(tsck.InvalidNameError, match="cannot be the name"):
        tsck.lightning.SnapshotCheckpoint(store, "a b")
    with pytest.raises(tsck.InvalidOptionError, match="no rule 'keep_lst'"):
        tsck.lightning.SnapshotCheckpoint(store, runs.REF, keep={"keep_lst": 1})
    with pytest.raises(tsck.InvalidOptionError, match="not both"):
        tsck.lightning.SnapshotCheckpoint(store, runs.REF, when=tsck.every_steps(2), every_n_train_steps=2)
    one, two = runs.checkpoint(tmp_path, store), runs.checkpoint(tmp_path, store, every_n_train_steps=4)
    with pytest.raises(tsck.InvalidOptionError, match="a ref of its own"):
        runs.trainer(tmp_path, one, two).fit(runs.seeded())


def test_another_version_of_lightning_is_refused(tmp_path: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as changed:
        changed.setattr(lightning, "__version__", "3.1.0")
        with pytest.raises(tsck.MissingExtraError, match=r"Lightning 3\.1\.0 is not supported"):
            _fit(tmp_path, runs.checkpoint(tmp_path, store))
    monkeypatch.setattr(ModelCheckpoint, "_monitor_candidates", lambda self: None)
    with pytest.raises(tsck.MissingExtraError, match="_monitor_candidates"):
        _fit(tmp_path, runs.checkpoint(tmp_path, store))


def test_a_store_that_is_given_by_its_path(tmp_path: Path) -> None:
    trainer = _fit(tmp_path, runs.checkpoint(tmp_path, tmp_path / "made"), max_epochs=1)
    trainer.fit(trainer.lightning_module)  # the same run: its own snapshots
    with tsck.open(tmp_path / "made", cache_dir=tmp_path / "cache") as store:
        assert _steps(store) == [3]
    loaded = tsck.lightning.load_from_checkpoint(runs.Model, tmp_path / "files" / "step=3.ckpt")
    assert loaded.hparams == trainer.lightning_module.hparams
    copied = pickle.loads(pickle.dumps(trainer.lightning_module))
    runs.assert_equal(runs.weights(copied), runs.weights(trainer.lightning_module))
    saves = trainer.checkpoint_callback
    assert pickle.loads(pickle.dumps(saves)).best_model_path == saves.best_model_path
    saves._store.close()

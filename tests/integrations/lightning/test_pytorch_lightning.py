"""`pytorch_lightning`, a package of its own with Lightning's contents: a subclass of its ModelCheckpoint over a store."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning

import tensorstore_ck as tsck
from tests.integrations.lightning import runs
from tests.integrations.lightning.conftest import QUIET

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning"), *QUIET]


class Saves(tsck.lightning.SnapshotMixin, pytorch_lightning.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """As docs/trainers/lightning.md has it."""


class Model(runs.Training, pytorch_lightning.LightningModule):  # type: ignore[misc]
    """The module of the other tests."""


class KillAfter(runs.Killing, pytorch_lightning.Callback):  # type: ignore[misc]
    """Ends a run."""


def _fit(folder: Path, *callbacks: Any, ckpt_path: str | None = None) -> Any:
    pytorch_lightning.seed_everything(7, verbose=False)
    options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": runs.Kept(), "log_every_n_steps": 1}
    options |= {"accelerator": "cpu", "devices": 1, "max_epochs": runs.EPOCHS, "enable_checkpointing": bool(callbacks)}
    trainer = pytorch_lightning.Trainer(**options, default_root_dir=folder, callbacks=list(callbacks))
    trainer.fit(Model(), ckpt_path=ckpt_path)
    return trainer


def test_a_killed_run_continues(tmp_path: Path) -> None:
    whole = _fit(tmp_path)
    opened = {"store": tmp_path / "store", "ref": runs.REF}
    saves: dict[str, Any] = {**opened, "dirpath": tmp_path / "files", "every_n_train_steps": 3, "save_top_k": -1}
    with pytest.raises(runs.Killed):
        _fit(tmp_path, KillAfter(8), Saves(**saves))
    resumed = _fit(tmp_path, Saves(**saves), ckpt_path="last")
    assert resumed.lightning_module.seen == whole.lightning_module.seen[6:]
    assert runs.logged(resumed) == runs.logged(whole)[-len(runs.logged(resumed)) :]
    runs.assert_equal(runs.weights(resumed.lightning_module), runs.weights(whole.lightning_module))
    loaded = tsck.lightning.load_from_checkpoint(Model, f"{runs.REF}@15", store=tmp_path / "store")
    runs.assert_equal(runs.weights(loaded), runs.weights(whole.lightning_module))

"""LightningCLI: a callback over a store from a configuration file."""

import json
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.integrations.lightning import runs
from tests.integrations.lightning.conftest import QUIET, Undisturbed

pytest.importorskip("jsonargparse")

from lightning.pytorch.cli import LightningCLI

pytestmark = [pytest.mark.slow, *QUIET]


def _callback(folder: Path, **options: Any) -> dict[str, Any]:
    given = {"store": str(folder / "store"), "ref": runs.REF, "dirpath": str(folder / "files"), "save_top_k": -1, **options}
    return {"class_path": "tensorstore_ck.lightning.SnapshotCheckpoint", "init_args": given}


def _fit(folder: Path, callbacks: list[dict[str, Any]], *arguments: str) -> Any:
    """The Trainer of ``fit --config FILE``."""
    trainer = {"accelerator": "cpu", "devices": 1, "max_epochs": runs.EPOCHS, "log_every_n_steps": 1, "enable_progress_bar": False}
    trainer |= {"enable_model_summary": False, "logger": {"class_path": f"{runs.__name__}.Kept"}, "callbacks": callbacks}
    config = folder / "config.json"
    config.write_text(json.dumps({"seed_everything": 7, "trainer": trainer}))
    return LightningCLI(runs.Model, args=["fit", f"--config={config}", *arguments], save_config_callback=None).trainer


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"every_n_train_steps": 3, "keep": {"keep_last": 9}}, id="arguments of ModelCheckpoint"),
        pytest.param({"when": {"class_path": "tensorstore_ck.every_steps", "init_args": {"steps": 3}}}, id="a trigger"),
    ],
)
def test_a_killed_run_continues(tmp_path: Path, undisturbed: Undisturbed, options: dict[str, Any]) -> None:
    kill = {"class_path": f"{runs.__name__}.KillAfter", "init_args": {"step": 8}}
    with pytest.raises(runs.Killed):
        _fit(tmp_path, [kill, _callback(tmp_path, **options)])
    resumed = _fit(tmp_path, [_callback(tmp_path, **options)], "--ckpt_path=last")
    assert resumed.lightning_module.seen[0][0] == 6
    runs.assert_equal(runs.weights(resumed.lightning_module), undisturbed.weights)
    with tsck.open(tmp_path / "store", read_only=True, cache_dir=tmp_path / "cache") as store:
        assert sorted(each.step or 0 for each in store.log(runs.REF)) == [3, 6, 9, 12, 15]

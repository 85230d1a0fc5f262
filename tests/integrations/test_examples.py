"""The example scripts of trainers and trackers: a second run continues the first, and ends as one run does."""

import re
from pathlib import Path

import accelerate
import pytest
import torch

import tensorstore_ck as tsck


@pytest.mark.slow
def test_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from examples.transformers_trainer import main

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = []
    for folder, runs in (("cut", (20, 60)), ("whole", (60,))):
        for steps in runs:
            main(tmp_path / folder, steps)
        found.append(re.findall(r"runs/fox@(\d+)  loss ([\d.]+)", capsys.readouterr().out))
    cut, whole = found
    assert [step for step, _ in whole] == ["60", "40"]
    assert cut[-2:] == whole


def test_accelerate(tmp_path: Path) -> None:
    from examples import accelerate_loop

    def run(folder: str, epochs: int) -> float:
        for kind in (accelerate.state.AcceleratorState, accelerate.state.GradientState):
            kind._reset_state()
        return accelerate_loop.main(tmp_path / folder, epochs)

    whole = run("whole", 4)
    run("cut", 2)
    assert run("cut", 4) == whole


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning", "ignore::UserWarning")
def test_lightning(tmp_path: Path) -> None:
    from examples import lightning_trainer

    whole = lightning_trainer.main(tmp_path / "whole", 2)
    lightning_trainer.main(tmp_path / "cut", 1)
    assert lightning_trainer.main(tmp_path / "cut", 2) == whole


def trained(folder: Path) -> dict[str, torch.Tensor]:
    with tsck.open(folder / "store", read_only=True) as store:
        state: dict[str, torch.Tensor] = store.checkout("runs/regression")["model"]
    return state


@pytest.mark.slow  # making the tables of a tracking database takes seconds
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # SQLAlchemy's, of MLflow's tables
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny, the extra mlflow")
    from examples import mlflow_snapshots

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")  # `set_tracking_uri` sets it
    try:
        restored = mlflow_snapshots.main(tmp_path).state_dict()
    finally:
        mlflow.set_tracking_uri(None)
    torch.testing.assert_close(restored, trained(tmp_path), rtol=0, atol=0)


@pytest.mark.slow  # wandb starts a process
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="needs wandb, the extra of that name")
    from examples import wandb_snapshots

    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / name))
    try:
        restored = wandb_snapshots.main(tmp_path).state_dict()
    finally:
        wandb.teardown()
    torch.testing.assert_close(restored, trained(tmp_path), rtol=0, atol=0)

"""The examples of MLflow and Weights & Biases."""

from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck


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

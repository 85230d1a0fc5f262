"""Snapshots in MLflow: ``python -m examples.mlflow_snapshots FOLDER``. Logs a snapshot to a run, and restores it by the run's id.

The run in MLflow has a name and the URL of the store; the tensors are in the store alone.
"""

import argparse
from pathlib import Path

import mlflow
import torch
from torch import nn

import tensorstore_ck as tsck


def train(folder: Path, steps: int) -> str:
    """Trains; returns the id of the run."""
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = torch.randn(64, 8)
    training = tsck.TrainingState(model=model, optimizer=optimizer)
    with tsck.open(folder / "store", create=True) as store, mlflow.start_run() as run:
        for step in range(1, steps + 1):
            loss = nn.functional.mse_loss(model(values), values.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            mlflow.log_metric("loss", loss.item(), step=step)
        training.put(store, ref="runs/regression", step=steps, metrics={"loss": loss.item()})
        tsck.mlflow.log_snapshot(store, "runs/regression")
    return str(run.info.run_id)


def restore(run_id: str) -> nn.Module:
    """The model that the run has logged."""
    found = tsck.mlflow.find_snapshot(run_id)
    with tsck.open(found.store, read_only=True) as store:
        state = store.checkout(found.address, select=["model.*"])
    model = nn.Linear(8, 1)
    model.load_state_dict(state["model"])
    return model


def main(folder: Path) -> nn.Module:
    """Trains, and restores."""
    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    if mlflow.get_experiment_by_name("regression") is None:
        mlflow.create_experiment("regression", artifact_location=(folder.absolute() / "artifacts").as_uri())
    mlflow.set_experiment("regression")
    return restore(train(folder, 3))


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    print(main(given.folder).state_dict())

"""Snapshots in Weights & Biases: ``python -m examples.wandb_snapshots FOLDER``. Logs a snapshot as an artifact, offline, and restores it.

The artifact has the URL of the snapshot; the tensors are in the store alone. ``wandb sync`` uploads the run later. Online, another job
restores the snapshot with ``restore(run.use_artifact("runs-regression:latest"))``.
"""

import argparse
from pathlib import Path

import torch
import wandb
from torch import nn

import tensorstore_ck as tsck


def main(folder: Path) -> nn.Module:
    """Trains; returns the model that the artifact refers to."""
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    values = torch.randn(64, 8)
    training = tsck.TrainingState(model=model, optimizer=optimizer)
    with tsck.open(folder / "store", create=True) as store, wandb.init(project="regression", mode="offline", dir=folder) as run:
        for _ in range(3):
            loss = nn.functional.mse_loss(model(values), values.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            run.log({"loss": loss.item()})
        training.put(store, ref="runs/regression", step=3, metrics={"loss": loss.item()})
        artifact = tsck.wandb.log_snapshot(store, "runs/regression")
    return restore(artifact)


def restore(artifact: wandb.Artifact) -> nn.Module:
    """The model that an artifact refers to."""
    found = tsck.wandb.find_snapshot(artifact)
    with tsck.open(found.store, read_only=True) as store:
        state = store.checkout(found.address, select=["model.*"])
    model = nn.Linear(8, 1)
    model.load_state_dict(state["model"])
    return model


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    print(main(given.folder).state_dict())

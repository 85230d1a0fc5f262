"""Saves beside the training, when triggers say so: ``python -m examples.background_saves FOLDER``. It resumes after a kill."""

import argparse
from pathlib import Path

import torch
from torch import nn

import tensorstore_ck as tsck

STEPS = 60


def main(folder: Path) -> list[int]:
    """Trains; returns the steps of the snapshots that the rules kept."""
    torch.manual_seed(1)
    inputs = torch.randn(64, 8)
    targets = inputs.sum(1, keepdim=True)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = tsck.TrainingState(model=model, optimizer=optimizer)
    when = tsck.every_steps(10) | tsck.on_improvement("loss", min_delta=0.5) | tsck.last() | tsck.on_preemption()
    keep = {"keep_last": 3, "keep_best": (2, "loss", "min")}
    with (
        tsck.open(folder / "store", create=True) as store,
        tsck.ProgressLine(store),
        tsck.Checkpointer(store, training, ref="runs/example", when=when, keep=keep) as checkpointer,
    ):
        resumed = checkpointer.resume()
        for step in range((resumed.step or 0) + 1 if resumed else 1, STEPS + 1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step, {"loss": loss.item()}, last=step == STEPS)  # saves in the background if a trigger fires
            if checkpointer.preempted:
                break
        checkpointer.wait()
        return [snapshot.step or 0 for snapshot in store.log("runs/example")]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    print("kept", main(given.folder))

"""A loop that saves and resumes bit for bit: ``python -m examples.save_and_resume FOLDER [STEPS]``, and again after a kill."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tensorstore_ck as tsck

SAVE_EVERY = 5


def main(folder: Path, steps: int) -> float:
    """Trains up to `steps`; returns the newest loss."""
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(400, 8), torch.randn(400, 1))
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    cursor = tsck.SampleCursor(len(data), batch_size=40)
    loader = DataLoader(data, batch_sampler=cursor.batches(), generator=torch.Generator())
    training = tsck.TrainingState(model=model, optimizer=optimizer, dataloader=cursor)
    with tsck.open(folder / "store", create=True) as store:
        resumed = training.restore(store, "runs/example")
        step, loss = (resumed.step or 0, resumed.metrics["loss"]) if resumed else (0, 0.0)
        while step < steps:
            for inputs, targets in loader:  # what is left of this epoch
                error = nn.functional.mse_loss(model(inputs), targets)
                error.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                cursor.advance()
                step, loss = step + 1, error.item()
                if step % SAVE_EVERY == 0:
                    training.put(store, ref="runs/example", step=step, metrics={"loss": loss})
                if step == steps:
                    break
    return loss


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=100)
    given = options.parse_args()
    print("loss", main(given.folder, given.steps))

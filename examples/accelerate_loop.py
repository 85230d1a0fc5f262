"""accelerate with snapshots in a store: ``python -m examples.accelerate_loop FOLDER [EPOCHS]``. Kill it and start it again: it continues.

The only line that is not in a script without a store is `attach`.
"""

import argparse
from pathlib import Path

import accelerate
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tensorstore_ck as tsck

SAVE_EVERY = 4


class Progress:
    """What the loop needs to go on: registered for checkpointing."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        """For `save_state`."""
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """For `load_state`."""
        self.steps = state["steps"]


def main(folder: Path, epochs: int) -> float:
    """Trains; returns the newest loss."""
    accelerate.utils.set_seed(1)
    accelerator = accelerate.Accelerator(cpu=True)
    with tsck.open(folder / "store", create=True) as store:
        tsck.accelerate.attach(accelerator, store=store, ref="runs/regression")
        values = torch.randn(160, 8)
        model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(values, values.sum(1, keepdim=True)), batch_size=16, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        progress = Progress()
        accelerator.register_for_checkpointing(progress)
        if "runs/regression" in store.branches():
            accelerator.load_state()
        loss = torch.zeros(())
        epoch, done = divmod(progress.steps, len(loader))
        for number in range(epoch, epochs):
            batches = accelerator.skip_first_batches(loader, done) if number == epoch and done else loader
            for given, wanted in batches:
                loss = nn.functional.mse_loss(model(given), wanted)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                progress.steps += 1
                if progress.steps % SAVE_EVERY == 0:
                    accelerator.save_state()
        accelerator.end_training()
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("epochs", type=int, nargs="?", default=3)
    given = options.parse_args()
    print("loss", main(given.folder, given.epochs))

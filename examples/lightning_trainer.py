"""Lightning with snapshots in a store: ``python -m examples.lightning_trainer FOLDER [EPOCHS]``. Kill it and start it again: it continues.

The only line that is not in a script without a store is the callback; `ckpt_path="last"` is Lightning's own, and does nothing at the first
start.
"""

import argparse
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import tensorstore_ck as tsck


class Regression(lightning.LightningModule):  # type: ignore[misc]
    """A small model with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _: int) -> torch.Tensor:
        """One batch."""
        values, wanted = batch
        loss = nn.functional.mse_loss(self.net(values), wanted)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main(folder: Path, epochs: int) -> float:
    """Trains; returns the newest loss."""
    lightning.seed_everything(1, verbose=False)
    values = torch.randn(160, 8)
    loader = DataLoader(TensorDataset(values, values.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        callbacks=[tsck.lightning.SnapshotCheckpoint(folder / "store", "runs/regression", when=tsck.every_steps(4), save_top_k=-1)],
    )
    trainer.fit(Regression(), loader, ckpt_path="last")
    return float(trainer.callback_metrics["loss"])


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("epochs", type=int, nargs="?", default=3)
    given = options.parse_args()
    print("loss", main(given.folder, given.epochs))

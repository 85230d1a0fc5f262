"""DeepSpeed with snapshots in a store: ``torchrun --nproc-per-node 2 -m examples.deepspeed_loop FOLDER [STEPS]``.

Kill it and start it again, also with another number of ranks or another ZeRO stage: it continues. The only line that is not in a script
without a store is `attach`.
"""

import argparse
from pathlib import Path

import deepspeed
import torch
from torch import nn

import tensorstore_ck as tsck

SAVE_EVERY = 5
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "zero_optimization": {"stage": 2},
    "bf16": {"enabled": True},
    "zero_force_ds_cpu_optimizer": False,
}


def main(folder: Path, steps: int) -> float:
    """Trains; returns the newest loss."""
    torch.manual_seed(1)
    deepspeed.init_distributed()
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=CONFIG)
    tsck.deepspeed.attach(engine, folder / "store", ref="runs/regression")
    engine.load_checkpoint(folder / "checkpoints")
    loss = torch.zeros(())
    while engine.global_steps < steps:
        given = torch.randn(16, 8, device=engine.device)
        loss = nn.functional.mse_loss(engine(given.bfloat16()).float(), given.sum(1, keepdim=True))
        engine.backward(loss)
        engine.step()
        if engine.global_steps % SAVE_EVERY == 0:
            engine.save_checkpoint(folder / "checkpoints")
    engine.destroy()
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=20)
    given = options.parse_args()
    print("loss", main(given.folder, given.steps))

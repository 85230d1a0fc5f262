"""torch_checkpointing's API with snapshots in a store: ``python -m examples.torch_checkpointing_loop FOLDER [STEPS]``. It continues when
it is started again.

With torch_checkpointing, the line of the manager is `CheckpointManager.Config(...).build()`, and the script looks for the newest folder.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensorstore_ck as tsck

SAVE_EVERY = 5


def main(folder: Path, steps: int) -> float:
    """Trains; returns the newest loss."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step, loss = 0, torch.zeros(())
    with tsck.CheckpointManager(store=folder / "store", ref="runs/regression", keep={"keep_last": 3}) as manager:
        into: dict[str, Any] = {"model": model.state_dict(), "optimizer": None, "step": None, "generator": None}
        newest = manager.load_newest(into, strict=True)
        if newest is not None:
            _, found = newest
            optimizer.load_state_dict(found["optimizer"])
            torch.set_rng_state(found["generator"])
            step = found["step"]
        while step < steps:
            values = torch.randn(16, 8)
            loss = nn.functional.mse_loss(model(values), values.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            with manager.lock():
                optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                manager.save(f"step_{step}", {**state, "step": step, "generator": torch.get_rng_state()})
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=20)
    given = options.parse_args()
    print("loss", main(given.folder, given.steps))

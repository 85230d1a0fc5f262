"""Files of torch.save in, a slice without a restore, and safetensors out: ``python -m examples.import_and_export FOLDER``."""

import argparse
from pathlib import Path

import torch

import tensorstore_ck as tsck


def main(folder: Path) -> torch.Tensor:
    """Writes three checkpoints, imports them, and exports the newest; returns two rows of its weights."""
    torch.manual_seed(1)
    old = folder / "old"
    old.mkdir(parents=True)
    for step in (100, 200, 300):
        torch.save({"model": torch.nn.Linear(16, 4).state_dict(), "step": step}, old / f"step_{step}.pt")
    with tsck.open(folder / "store", create=True) as store:
        tsck.import_history(store, [str(old / "*.pt")], step_from="name", ref="runs/imported")
        print("steps:", [snapshot.step for snapshot in store.log("runs/imported")])
        tsck.export_snapshot(store, "runs/imported", folder / "weights", format="safetensors", select=["model.*"])
        with store.open_snapshot("runs/imported@300") as snapshot:
            rows = snapshot["model.weight"][0:2]  # reads only the blocks that it needs
    assert isinstance(rows, torch.Tensor)
    return rows


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    print(main(given.folder))

"""What stays, what goes, and undo: ``python -m examples.keep_and_free FOLDER``."""

import argparse
from pathlib import Path

import torch

import tensorstore_ck as tsck

REF = "runs/example"


def main(folder: Path) -> list[int]:
    """Saves 10 snapshots, keeps some, frees the rest; returns the steps that stay."""
    torch.manual_seed(1)
    with tsck.open(folder / "store", create=True) as store:
        store.put_snapshot({"w": torch.randn(100_000)}, ref=REF, step=0, metrics={"loss": 3.0})
        store.pin(f"{REF}@0", reason="the first one is evaluated")
        store.set_policy("runs/*", keep_last=2, keep_best=(1, "loss", "min"))
        for step in range(1, 10):
            store.put_snapshot({"w": torch.randn(100_000)}, ref=REF, step=step, metrics={"loss": abs(step - 4.5)})
        store.forget(f"{REF}@8")
        store.undo()  # for a day
        plan = store.gc(dry_run=True)
        print(f"gc would free {plan.deleted_bytes:,} bytes now, and the rest in a day")
        report = store.gc(tsck.GcOptions(undo_window_seconds=0, min_age_seconds=0, max_delete=1.0))
        print(f"without the undo window and the age of a day it frees {report.deleted_bytes:,} bytes")
        assert store.fsck(read_data=True).ok
        return [snapshot.step or 0 for snapshot in reversed(store.log(REF))]


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    print("stay:", *main(given.folder))

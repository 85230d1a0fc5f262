"""Two ways to go on from one snapshot, compared: ``python -m examples.branch_and_compare FOLDER``."""

import argparse
from pathlib import Path

import torch

import tensorstore_ck as tsck


def main(folder: Path) -> tuple[list[str], int]:
    """Makes a branch; returns the names of the tensors that differ, and how many bytes the branch made the store grow by."""
    torch.manual_seed(1)
    state = {"base": torch.randn(1 << 20), "head": torch.randn(1000)}
    with tsck.open(folder / "store", create=True) as store:
        store.put_snapshot(state, ref="runs/base", step=100, metrics={"loss": 2.0})
        store.tag("before-tuning", "runs/base")
        store.branch("exp/higher-rate", at="before-tuning")
        tuned = store.checkout("exp/higher-rate")
        tuned["head"] += 0.1
        snapshot = store.put_snapshot(tuned, ref="exp/higher-rate", step=101, metrics={"loss": 1.9})
        difference = store.diff("before-tuning", "exp/higher-rate")
        return [tensor.name for tensor in difference.tensors], snapshot.new_bytes


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    given = options.parse_args()
    names, grown = main(given.folder)
    print("differs:", *names)
    print(f"the store grew by {grown:,} bytes")

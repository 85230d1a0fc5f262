"""A loop with an `Accelerator` under torchrun: ``rank_job FOLDER ddp|fsdp [RESUME]``. Says each step, and at the end what it did."""

import os
import sys
from pathlib import Path

import torch

import tensorstore_ck as tsck
from tests.integrations.accelerate import runs
from tests.integrations.rank_runs import say


def main(folder: Path, kind: str, resume: str | None) -> None:
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{os.environ['RANK']}") as store:
        run = runs.train(
            folder / "out",
            store,
            resume=False if resume is None else None if resume == "newest" else resume,
            attach={"asynchronous": False},
            fsdp=kind == "fsdp",
            on_load=lambda weights: say(loaded={name: tensor.tolist() for name, tensor in weights.items()}),
            on_step=lambda step: say(step=step),
        )
        assert run.is_sharded == (kind == "fsdp")
        weights = {name: tensor.double().sum().item() for name, tensor in run.weights.items()}
        say(batches=run.batches, losses=run.losses, weights=weights, average=run.average, drawn=torch.rand(()).item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)

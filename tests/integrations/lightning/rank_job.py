"""A run of Lightning under torchrun: ``rank_job FOLDER STRATEGY [CKPT_PATH]``. Says each step, and at the end what it logged."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

import tensorstore_ck as tsck
from tests.integrations.lightning import runs
from tests.integrations.rank_runs import say


class SayStep(Callback):  # type: ignore[misc]
    """Before a batch."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        say(step=trainer.global_step)


def main(folder: Path, strategy: str, ckpt_path: str | None) -> None:
    rank = os.environ["RANK"]
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        module, chosen = runs.of_strategy(strategy)
        limit = {"max_steps": 9, "max_epochs": -1} if strategy == "ddp_steps" else {}
        saves = runs.checkpoint(folder, store, every_n_train_steps=2, asynchronous=False)
        trainer = runs.trainer(folder, SayStep(), saves, strategy=chosen, devices=2, **limit)
        trainer.fit(module, ckpt_path=ckpt_path)
        hashed = sum(runs.whole(each).double().sum().item() for each in module.state_dict().values())
        say(logged=runs.logged(trainer), seen=module.seen, weights=hashed, drawn=torch.rand(()).item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)

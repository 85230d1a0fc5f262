"""A loop with Fabric under torchrun: ``fabric_rank_job FOLDER ddp|fsdp2 [PATH]``. Says each step, and at the end what it did."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import fully_shard

import tensorstore_ck as tsck
from tests.integrations.lightning import runs
from tests.integrations.rank_runs import say

STEPS = 8


def shard(module: nn.Module, mesh: Any) -> nn.Module:
    """Each layer, and the rest."""
    for each in module.children():
        fully_shard(each, mesh=mesh["data_parallel"])
    fully_shard(module, mesh=mesh["data_parallel"])
    return module


def main(folder: Path, kind: str, path: str | None) -> None:
    """Each rank has its own data and dropout, and with DDP its own means of the batch norm."""
    sharded = ModelParallelStrategy(shard, data_parallel_size=2, tensor_parallel_size=1)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=sharded if kind == "fsdp2" else DDPStrategy(broadcast_buffers=False))
    fabric.launch()
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{fabric.global_rank}") as store:
        tsck.lightning.attach(fabric, store=store, ref=runs.REF)
        torch.manual_seed(3)
        norm = [] if kind == "fsdp2" else [nn.BatchNorm1d(8)]
        model = fabric.setup(nn.Sequential(nn.Linear(4, 8), *norm, nn.Dropout(0.5), nn.Linear(8, 1)))
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        torch.manual_seed(fabric.global_rank if path is None else 99)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "step": 0, "losses": []}
        if path is not None:
            fabric.load(path, state)
        while state["step"] < STEPS:
            say(step=state["step"])
            loss = model(torch.randn(4, 4)).square().mean()
            fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            state["step"] += 1
            state["losses"].append(loss.item())
            if state["step"] % 2 == 0:
                fabric.save(folder / f"step-{state['step']}.ckpt", state)
        weights = {name: runs.whole(each).double().sum().item() for name, each in model.state_dict().items()}
        say(losses=state["losses"], weights=weights, rates=schedule.get_last_lr(), drawn=torch.rand(()).item())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)

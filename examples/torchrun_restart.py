"""A job that torchrun restarts when a host is gone: ``torchrun --nnodes 2 --max-restarts 3 -m examples.torchrun_restart FOLDER [STEPS]``.

If a host disappears, its agent says nothing, and a collective may hang. The store notices the dead rank in the next save, 5 seconds after
its last heartbeat. This process then ends, and its agent restarts the job with the hosts that are left, or with a spare one. Set
``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``: torch otherwise gives the new ranks the key-value store of the old ones. It runs on CPUs.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tensorstore_ck as tsck

REF = "runs/restarted"


def leave(event: tsck.Event) -> None:
    """Ends this process if another rank is dead; the agent sees its exit code."""
    if event.kind == "rank_dead":
        print(f"rank {event.rank} leaves: rank {event.fields['dead_rank']} is dead", flush=True)
        os._exit(1)  # called on another thread: the main one waits in the save, or hangs in a collective


def main(folder: Path, steps: int) -> float:
    """Trains; returns the newest loss."""
    everyone, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = tsck.TrainingState(model=model, optimizer=optimizer)
    loss = torch.zeros(())
    with tsck.open(folder / "store", create=True, dead_after_seconds=5) as store:
        store.on_event(leave)
        resumed = training.restore(store, REF, group=everyone)
        done = resumed.step or 0 if resumed else 0
        for step in range(done + 1, steps + 1):
            generator = torch.Generator().manual_seed(step)
            given = torch.randn(12, 8, generator=generator).chunk(ranks)[rank]
            loss = nn.functional.mse_loss(model(given), given.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            training.put(store, ref=REF, step=step, group=everyone)
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=10)
    given = options.parse_args()
    dist.init_process_group("gloo")
    print("loss", main(given.folder, given.steps))
    dist.destroy_process_group()

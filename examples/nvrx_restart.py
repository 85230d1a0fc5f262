"""A function that NVRx restarts in its process when a rank is dead: start a process a rank, with the variables that torchrun would set.

``RANK=0 WORLD_SIZE=2 MASTER_ADDR=... MASTER_PORT=... python -m examples.nvrx_restart FOLDER [STEPS]``. torchrun itself would end the
other ranks. If a rank dies, the store notices it in the next save, 5 seconds after its last heartbeat, and the save raises an error on all
ranks that are left. NVRx then calls `train` again on them, which goes on from the newest snapshot. NVRx finds out itself that a process
has ended; the store finds a host that is gone before NVRx's `heartbeat_timeout`. It runs on CPUs.
"""

import argparse
import datetime
import os
from pathlib import Path

import torch
import torch.distributed as dist
from nvidia_resiliency_ext import inprocess
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

import tensorstore_ck as tsck

REF = "runs/restarted"


@inprocess.Wrapper(  # type: ignore[untyped-decorator]
    store_kwargs={"port": int(os.environ.get("MASTER_PORT", "0")) + 1},  # of NVRx's own key-value store
    heartbeat_timeout=datetime.timedelta(seconds=10),
)
def train(folder: Path, steps: int, call: inprocess.CallWrapper | None = None) -> float:
    """Trains; returns the newest loss. NVRx passes `call`, and sets RANK and WORLD_SIZE."""
    assert call is not None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    key_values = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0, multi_tenant=True)
    dist.init_process_group("gloo", store=PrefixStore(str(call.iteration), key_values), rank=rank, world_size=ranks)
    everyone = dist.group.WORLD
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    training = tsck.TrainingState(model=model, optimizer=optimizer)
    loss = torch.zeros(())
    with tsck.open(folder / "store", create=True, dead_after_seconds=5) as store:
        resumed = training.restore(store, REF, group=everyone)
        done = resumed.step or 0 if resumed else 0
        print(f"rank {rank} of {ranks} begins after step {done}", flush=True)
        for step in range(done + 1, steps + 1):
            given = torch.randn(12, 8, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
            loss = nn.functional.mse_loss(model(given), given.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            training.put(store, ref=REF, step=step, group=everyone)
    dist.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=10)
    given = options.parse_args()
    print("loss", train(given.folder, given.steps))

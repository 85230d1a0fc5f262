"""A training with torchft that goes on without a replica group of which a rank is dead, and saves to a store.

Start ``torchft_lighthouse``, and for each replica group a job: ``REPLICA=0 TORCHFT_LIGHTHOUSE=http://... torchrun --nproc-per-node 2 -m
examples.torchft_loop FOLDER [STEPS]``. All ranks have the whole model; the ranks of the first replica group of the quorum save it together.

If one of them dies, the store notices it in the next save, 5 seconds after its last heartbeat. The others of its replica group then end,
since the group cannot vote on a step without it: the next quorum is one of the replica groups that are left, and the next of them saves.
A replica group that is started again takes the state of the others, or where there are none the newest snapshot. It runs on CPUs.
"""

import argparse
import datetime
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchft import Manager, ProcessGroupGloo

import tensorstore_ck as tsck

REF = "runs/torchft"


def leave(event: tsck.Event) -> None:
    """Ends this process if another rank of the replica group is dead; what has started the group starts it again."""
    if event.kind == "rank_dead":
        print(f"rank {event.rank} leaves: rank {event.fields['dead_rank']} is dead", flush=True)
        os._exit(1)


def main(folder: Path, steps: int) -> float:
    """Trains; returns the newest loss."""
    everyone, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()  # of this replica group
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=datetime.timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        replica_id=f"replica_{os.environ['REPLICA']}_",
        timeout=datetime.timedelta(seconds=30),
    )
    training = tsck.TrainingState(model=model, optimizer=optimizer, extra={"manager": manager})
    loss = torch.zeros(())
    with tsck.open(folder / "store", create=True, dead_after_seconds=5) as store:
        store.on_event(leave)
        training.restore(store, REF, group=everyone)
        while manager.current_step() < steps:
            manager.start_quorum()
            given = torch.randn(12, 8).chunk(ranks)[rank]
            loss = nn.functional.mse_loss(model(given), given.sum(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for parameter in model.parameters():  # within the replica group DDP has averaged them
                manager.allreduce(parameter.grad).wait()
            if manager.should_commit():
                optimizer.step()
                print(f"step {manager.current_step()} of {manager.num_participants()} replica groups", flush=True)
                if manager.participating_rank() == 0:  # the quorum says who saves, so the head may be another replica group's
                    training.put(store, ref=REF, step=manager.current_step(), group=everyone, expect=tsck.ANY)
    manager.shutdown()
    return loss.item()


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("folder", type=Path)
    options.add_argument("steps", type=int, nargs="?", default=10)
    given = options.parse_args()
    dist.init_process_group("gloo")
    print("loss", main(given.folder, given.steps))
    dist.destroy_process_group()

"""What each rank of the pool does in `test_ranks`."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tensorstore_ck as tsck
from tests.session.group.pool import GROUPS

ROWS, COLUMNS = 600, 400
Full = dict[str, dict[str, torch.Tensor]]


def full_state(step: int) -> Full:
    """Masters that move a little with each step, and their weights."""
    generator = torch.Generator().manual_seed(0)
    masters = {f"m{number}": torch.randn(ROWS, COLUMNS, generator=generator) * 0.02 for number in range(2)}
    for _ in range(step):
        for master in masters.values():
            master.add_(torch.randn(ROWS, COLUMNS, generator=generator), alpha=1e-5)
    return {"masters": masters, "weights": {name: master.bfloat16() for name, master in masters.items()}}


def sharded(state: Full, rank: int, ranks: int) -> dict[str, dict[str, DTensor]]:
    mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False)

    def shard(full: torch.Tensor) -> DTensor:
        local = full.chunk(ranks)[rank].clone()
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())

    return {group: {name: shard(full) for name, full in tensors.items()} for group, tensors in state.items()}


def put_steps(folder: str, steps: int, ranks: int, staged: bool) -> list[str]:
    """The roots; every other step is saved in the background, and staged on request."""
    rank = dist.get_rank()
    roots = []
    staging = f"{folder}/staging" if staged else None
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", codec="small", staging=staging) as store:
        for step in range(steps):
            state = sharded(full_state(step), rank, ranks)
            if step % 2:
                roots.append(store.put_snapshot_async(state, ref="job", step=step, group=GROUPS[ranks]).wait().root)
            else:
                roots.append(store.put_snapshot(state, ref="job", step=step, group=GROUPS[ranks]).root)
    return roots


def restore(folder: str, root: str, step: int, ranks: int) -> bool:
    """Each rank its shards."""
    rank = dist.get_rank()
    wanted, into = sharded(full_state(step), rank, ranks), sharded(full_state(0), rank, ranks)
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/other-{rank}") as store:
        store.checkout(root, into=into, group=GROUPS[ranks])
    return all(
        torch.equal(into[group][name].to_local(), each.to_local()) for group, tensors in wanted.items() for name, each in tensors.items()
    )

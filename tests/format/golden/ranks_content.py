"""What the golden store of unlike ranks holds. `python -m tests.format.golden.ranks_content FOLDER` makes one: once for a version.

Four gloo ranks put two snapshots: one united layout with every way to hold a tensor, and quantised tensors, plain and as shards.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torchao.optim.subclass_8bit import OptimState8bit

import tensorstore_ck as tsck
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store, opened

RANKS = 4
QMAP = torch.arange(-128, 128).float() / 128


def ramp(*shape: int, step: int = 1) -> torch.Tensor:
    """Numbers that no version of torch makes otherwise."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int64) * 37 % 1009 * step).float().reshape(shape)


def quantised(rows: int, start: int = 0) -> OptimState8bit:
    """Rows of 256 elements each, which are one block."""
    codes = (torch.arange(start * 256, (start + rows) * 256) * 7 % 256).to(torch.uint8).reshape(rows, 256)
    return OptimState8bit(codes, torch.arange(start, start + rows).float() + 1, QMAP.clone(), signed=True)


def whole_state() -> dict[str, Any]:
    """As one process has the first snapshot."""
    experts = {f"expert.{rank}": ramp(40, 40, step=rank + 2) for rank in range(RANKS)}
    return {"w": ramp(64, 40), "norm": ramp(1500), "embed": ramp(30, 60), "flat": ramp(50, 50), "experts": experts, "epoch": 3}


def state_of(rank: int) -> dict[str, Any]:
    """What a rank puts of it."""
    whole = whole_state()

    def on(ranks: Any, name: str, *placements: Any) -> DTensor:
        mesh = DeviceMesh("cpu", torch.tensor(ranks), _init_backend=False)
        return distribute_tensor(whole[name], mesh, list(placements), src_data_rank=None)

    half = rank % 2 * 1250
    state = {
        "w": on([[0, 1], [2, 3]], "w", Shard(0), Shard(1)),
        "norm": on([rank % 2, rank % 2 + 2], "norm", Shard(0)),
        "embed": whole["embed"] if rank == 0 else on([1, 2, 3], "embed", Shard(1)),
        "flat": tsck.FlatShard(whole["flat"].flatten()[half : half + 1250].clone(), (50, 50), half),
        "experts": {f"expert.{rank}": whole["experts"][f"expert.{rank}"]},
    }
    return state | ({"epoch": 3} if rank == 0 else {})


def quantised_of(rank: int) -> dict[str, Any]:
    """The second snapshot: a tensor that all ranks hold, and one of which each has two rows."""
    mesh = DeviceMesh("cpu", torch.arange(RANKS), _init_backend=False)
    shards = DTensor.from_local(quantised(2, 2 * rank), mesh, [Shard(0)], run_check=False)
    return {"here": quantised(3), "spread": shards}


def put(folder: str) -> list[str]:
    rank, store = torch.distributed.get_rank(), opened(folder, RANKS)
    options: dict[str, Any] = {"group": GROUPS[RANKS], "timeout_seconds": TIMEOUT_SECONDS}
    return [
        store.put_snapshot(state_of(rank), ref="united", step=1, **options).root,
        store.put_snapshot(quantised_of(rank), ref="quantised", step=1, **options).root,
    ]


def make(folder: Path, pool: Pool) -> list[str]:
    """Makes the store; the roots."""
    make_store(folder)
    return list(pool.run(put, str(folder), ranks=RANKS)[0])


if __name__ == "__main__":
    with Pool(RANKS) as ranks:
        print(make(Path(sys.argv[1]), ranks))

"""Ranks that each hold some rows of a tensor: ``pieces_job FOLDER``. Each saves and loads them, and says how many parts it read."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tests.integrations.megatron import on_cpu  # noqa: F401 - it replaces what asks CUDA
from tests.integrations.rank_runs import say

ROWS, COLUMNS = 16, 2000


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank, ranks, read = dist.get_rank(), dist.get_world_size(), list[str]()

    def rows(fill: float) -> dict[str, Any]:
        return {"weight": ShardedTensor.from_rank_offsets("weight", torch.full((ROWS, COLUMNS), fill), (0, rank, ranks))}

    def get(self: LocalBackend, name: str, *, max_bytes: int, original: Any = LocalBackend.get) -> bytes:
        read.extend([name] if name.startswith("parts/") else [])
        data: bytes = original(self, name, max_bytes=max_bytes)
        return data

    step = folder / "iter_0000001"
    if rank == 0:
        step.mkdir(parents=True)
    dist.barrier()
    with tsck.megatron.register(folder / "store", ref="run") as registered:
        dist_checkpointing.save(rows(float(rank)), str(step), sharded_strategy=registered.save)
    with tsck.megatron.register(folder / "store", ref="run"), patch.object(LocalBackend, "get", get):
        loaded = dist_checkpointing.load(rows(-1.0), str(step))["weight"]
    say(rank=rank, parts=len(set(read)), is_right=bool((loaded == rank).all()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

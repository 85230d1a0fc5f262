"""Real processes: a trainer of two ranks under FSDP2; followers of one process, and of two that hold a part of each tensor."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tensorstore_ck as tsck
from tests.feed.versions import step_of, update
from tests.session.group.conftest import folder
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened

__all__ = ["folder"]

pytestmark = pytest.mark.slow

COUNT = 2
REF = "runs/fsdp"
MODELS: dict[str, nn.Module] = {}
FEEDS: list[tuple[Any, dict[str, DTensor]]] = []
"""In a rank's process."""


def trained(where: str, step: int) -> dict[str, torch.Tensor]:
    """A rank of the trainer: changes a few elements, and saves its shards; returns the whole weights."""
    if not MODELS:
        torch.manual_seed(0)
        MODELS["model"] = nn.Sequential(nn.Linear(96, 129), nn.Linear(129, 50)).bfloat16()
        fully_shard(MODELS["model"], mesh=DeviceMesh("cpu", range(COUNT)))
    state = MODELS["model"].state_dict()
    for tensor in state.values():
        assert isinstance(tensor, DTensor)
        tensor.to_local().view(-1)[step :: 97 + dist.get_rank()] += 1
    opened(where, COUNT).put_snapshot(
        {"model": state}, ref=REF, step=step, group=GROUPS[COUNT], timeout_seconds=TIMEOUT_SECONDS, delta=True
    )
    return {name: tensor.full_tensor() for name, tensor in state.items()}


def followed(where: str, root: str) -> dict[str, torch.Tensor]:
    """A rank of the engine: takes its part of the version; returns the whole weights."""
    mesh = DeviceMesh("cpu", range(COUNT))
    if not FEEDS:
        placed = {"0.weight": Shard(0), "0.bias": Shard(0), "1.weight": Shard(1), "1.bias": Replicate()}
        shapes = {"0.weight": (129, 96), "0.bias": (129,), "1.weight": (50, 129), "1.bias": (50,)}
        served = {name: distribute_tensor(torch.zeros(shapes[name]).bfloat16(), mesh, [placement]) for name, placement in placed.items()}
        store = tsck.open(f"{where}/store", read_only=True, cache_dir=f"{where}/follower-{dist.get_rank()}")
        FEEDS.append((store.follow(REF, into={"model": served}), served))
    feed, served = FEEDS[0]
    feed.poll(root)
    dist.barrier(GROUPS[COUNT])
    feed.swap()
    assert feed.version.root == root
    return {name: tensor.full_tensor() for name, tensor in served.items()}


def test_a_trainer_of_ranks_is_followed_by_one_process_and_by_ranks(pool: Pool, folder: Path) -> None:
    served = nn.Sequential(nn.Linear(96, 129), nn.Linear(129, 50)).bfloat16()
    with tsck.open(folder / "store", read_only=True, cache_dir=folder / "cache") as store, store.follow(REF, into=served) as feed:
        for step in range(3):
            expected = pool.run(trained, str(folder), step, ranks=COUNT)[0]
            update(feed)
            assert step_of(feed) == step
            assert feed.version is not None
            parts = pool.run(followed, str(folder), feed.version.root, ranks=COUNT)
            for name, tensor in expected.items():
                assert torch.equal(served.state_dict()[name], tensor), name
                assert all(torch.equal(part[name], tensor) for part in parts), name

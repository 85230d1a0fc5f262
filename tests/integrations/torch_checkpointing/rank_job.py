"""A job with a `CheckpointManager` under torchrun: ``rank_job FOLDER save|load|loop [sync]``. Says what it has at the end."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import tensorstore_ck as tsck
from tests.integrations.rank_runs import say

REF = "runs/m"


def payload(step: int, *, spread: bool = True) -> dict[str, Any]:
    """Something that is spread, something equal, and each rank's own: in items of their own and within one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    whole = torch.arange(24.0).reshape(6, 4) + step
    return {
        "model": {
            "weight": distribute_tensor(whole, mesh, [Shard(0)]),
            "bias": torch.full((4,), float(step)),
            "bn": {"mean": torch.full((3,), float(rank)), "batches": rank},
        },
        "optimizer": {"state": {0: {"exp_avg": distribute_tensor(whole * 2, mesh, [Shard(1 if spread else 0)])}}, "groups": [{"lr": 0.1}]},
        "step": step,
        "rng": torch.full((2,), rank + 7),
        **({"config": {"name": "of the first"}} if rank == 0 else {}),
    }


def target(*, own: bool = True) -> dict[str, Any]:
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    found: dict[str, Any] = {
        "model": {"weight": distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)]), "bias": torch.zeros(4)},
        "optimizer": {"state": {0: {"exp_avg": distribute_tensor(torch.zeros(6, 4), mesh, [Replicate()])}}, "groups": [{"lr": 0.0}]},
        "step": 0,
    }
    if own:
        found["model"]["bn"] = {"mean": torch.zeros(3), "batches": 99}
        found["rng"] = None
        if dist.get_rank() == 0:
            found["config"] = None
    return found


def plain(value: Any) -> Any:
    """As JSON has it."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(child) for key, child in value.items()}
    return [plain(child) for child in value] if isinstance(value, list) else value


def main(folder: Path, what: str, kind: str) -> None:
    items = {"b": SimpleNamespace(resharder=object(), required=False)} if what == "refused" else {}
    config = SimpleNamespace(items=items, default=SimpleNamespace(resharder=None), save=SimpleNamespace()) if kind == "sync" else None
    store = tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{os.environ['RANK']}")
    with store, tsck.CheckpointManager(config, store=store, ref=REF) as manager:
        if what == "save":
            for step in (1, 2):
                saved = manager.save(f"/ckpt/step_{step}", payload(step))
                assert (saved is None) == (kind == "sync")
        elif what == "loop":
            step = 0
            newest = manager.newest_id()
            if newest is not None:
                step = manager.load(newest, into=target())["step"]
            say(began=step)
            while step < 6:
                step += 1
                manager.save(f"step_{step}", payload(step))
                say(step=step)
        elif what == "refused":
            payloads: dict[str, dict[str, Any]] = {"value": {"a": object()}, "key": {"a b": 1}, "shared": {"b": torch.ones(2)}}
            for name, wrong in payloads.items():
                try:
                    manager.save("step_1", wrong if dist.get_rank() == 1 else {"a": 1, "b": torch.zeros(2)})
                except tsck.StoreError as exc:
                    say(refused=name, message=str(exc))
        elif what == "load-what-is-missing":
            try:
                more = {"config": {"name": None}} if kind == "config" else {}
                manager.load("/ckpt/step_1", into={**target(), **more}, strict=True)
            except tsck.StoreError as exc:
                say(refused=str(exc))
        if what == "load":
            found = manager.load("/ckpt/step_1", into=target(own=kind != "shared"), strict=True)
            say(items=plain(found))
        say(ended=True)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else "async")
    finally:
        dist.destroy_process_group()

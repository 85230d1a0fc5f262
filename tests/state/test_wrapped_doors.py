"""No path reads memory at the address that a wrapper subclass reports: in a process of its own, since that was a crash."""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.effort import PATIENCE_SECONDS
from tests.session.group.pool import rank_process


class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Opaque":
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = func(*(vars(arg)["inner"] if isinstance(arg, Opaque) else arg for arg in args), **(kwargs or {}))
        return Opaque(made) if isinstance(made, torch.Tensor) else made


def large() -> torch.Tensor:
    return torch.ones(1 << 16, 8)


def sharded(local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, DeviceMesh("cpu", [0]), [Shard(0)], run_check=False)


def hidden() -> dict[str, Any]:
    return {"w": sharded(Opaque(large()))}


def freed() -> DTensor:
    tensor = distribute_tensor(large(), DeviceMesh("cpu", [0]), [Shard(0)])
    tensor.to_local().untyped_storage().resize_(0)
    return tensor


def flat() -> tsck.FlatShard:
    made = tsck.FlatShard(torch.ones(1 << 16), (1 << 16,), 0)
    made.local.untyped_storage().resize_(0)
    return made


def put(store: tsck.Store, value: Any) -> Any:
    return store.put_snapshot({"w": value}, ref="main", group=dist.group.WORLD)


DOORS: dict[str, Callable[[tsck.Store], Any]] = {
    "put": lambda store: put(store, hidden()["w"]),
    "put of freed memory": lambda store: put(store, freed()),
    "put on meta": lambda store: put(store, sharded(torch.ones(4, 4, device="meta"))),
    "async put": lambda store: store.put_snapshot_async(hidden(), ref="main", group=dist.group.WORLD).wait(),
    "into": lambda store: store.checkout("plain", into=hidden(), group=dist.group.WORLD),
    "into freed memory": lambda store: store.checkout("plain", into={"w": freed()}, group=dist.group.WORLD),
    "into freed plain memory": lambda store: store.checkout("plain", into={"w": freed().to_local()}),
    "into without a group": lambda store: store.checkout("plain", into={"w": Opaque(large())}),
    "flat shard": lambda store: put(store, flat()),
    "writer": lambda store: dcp.save(hidden(), storage_writer=Writer(store, "dcp")),
    "reader": lambda store: dcp.load(hidden(), storage_reader=Reader(store, "plain")),
}


def try_doors(folder: str, pipe: Connection) -> None:
    """Sends each door, then the errors behind it and the branches that are there then."""
    dist.init_process_group(
        "gloo",
        store=dist.HashStore(),  # type: ignore[attr-defined]
        rank=0,
        world_size=1,
    )
    with tsck.open(f"{folder}/store", create=True, cache_dir=f"{folder}/cache") as store:
        store.put_snapshot({"w": sharded(large())}, ref="plain", group=dist.group.WORLD)
        for name, door in DOORS.items():
            pipe.send(name)
            said = []
            try:
                door(store)
            except BaseException as exc:  # noqa: BLE001 - DCP's are not Exceptions
                told: BaseException | None = exc
                while told is not None:
                    said.append(f"{type(told).__name__} {told}")
                    told = told.__cause__ or told.__context__
            pipe.send(("\n".join(said), sorted(store.branches())))


def test_what_has_no_memory_of_its_own_is_refused_by_name_and_nothing_is_published(tmp_path: Path) -> None:
    here, there = multiprocessing.Pipe()
    process = rank_process(try_doors, str(tmp_path), there, daemon=True)
    process.start()
    there.close()
    for door in DOORS:
        assert here.poll(PATIENCE_SECONDS)
        assert here.recv() == door
        assert here.poll(PATIENCE_SECONDS), door
        said, branches = here.recv()  # an EOFError: the process crashed
        assert "Unsupported" in said, door
        assert " w" in said, door
        assert branches == ["plain"], door
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0

"""No path reads memory at the address that a wrapper subclass reports: each in a process of its own, since that was a crash."""

import subprocess
import sys

import pytest

from tests.effort import PATIENCE_SECONDS

PROGRAM = """
import os
import sys
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer

class Opaque(torch.Tensor):
    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        made = func(*(arg.inner if isinstance(arg, Opaque) else arg for arg in args), **(kwargs or {}))
        return Opaque(made) if isinstance(made, torch.Tensor) else made


def sharded(local):
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False)


def hidden():
    return sharded(Opaque(torch.ones(1 << 16, 8)))


def freed():
    tensor = distribute_tensor(torch.ones(1 << 16, 8), mesh, [Shard(0)])
    tensor.to_local().untyped_storage().resize_(0)
    return tensor


def plain():
    return {"w": distribute_tensor(torch.ones(1 << 16, 8), mesh, [Shard(0)])}


DOORS = {
    "put": lambda store: store.put_snapshot({"w": hidden()}, ref="main", group=group),
    "put of freed memory": lambda store: store.put_snapshot({"w": freed()}, ref="main", group=group),
    "put on meta": lambda store: store.put_snapshot({"w": sharded(torch.ones(4, 4, device="meta"))}, ref="main", group=group),
    "async put": lambda store: store.put_snapshot_async({"w": hidden()}, ref="main", group=group).result(),
    "into": lambda store: store.checkout("plain", into={"w": hidden()}, group=group),
    "into freed memory": lambda store: store.checkout("plain", into={"w": freed()}, group=group),
    "into freed plain memory": lambda store: store.checkout("plain", into={"w": freed().to_local()}),
    "into without a group": lambda store: store.checkout("plain", into={"w": Opaque(torch.ones(1 << 16, 8))}),
    "flat shard": lambda store: store.put_snapshot({"w": flat()}, ref="main", group=group),
    "writer": lambda store: dcp.save({"w": hidden()}, storage_writer=Writer(store, "dcp")),
    "reader": lambda store: dcp.load({"w": hidden()}, storage_reader=Reader(store, "plain")),
}


def flat():
    made = tsck.FlatShard(torch.ones(1 << 16), (1 << 16,), 0)
    made.local.untyped_storage().resize_(0)
    return made


def main(folder):
    with tsck.open(folder, create=True) as store:
        store.put_snapshot(plain(), ref="plain", group=group)
        try:
            DOORS[door](store)
        except BaseException as exc:  # DCP's are not Exceptions
            told = exc
            while told is not None:
                print(type(told).__name__, told)
                told = told.__cause__ or told.__context__
        print(sorted(store.branches()))


for door in DOORS:  # a process for each: what cannot be caught is seen
    sys.stdout.flush()
    child = os.fork()
    if not child:
        print("door:", door)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        group, mesh = dist.group.WORLD, DeviceMesh("cpu", [0])
        main(f"{sys.argv[1]}/{door}")
        sys.stdout.flush()
        os._exit(0)
    print(os.waitpid(child, 0)[1], "is how it ended")
"""

DOORS = (
    "put",
    "put of freed memory",
    "put on meta",
    "async put",
    "into",
    "into freed memory",
    "into freed plain memory",
    "into without a group",
    "flat shard",
    "writer",
    "reader",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("doors"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    return {door: text for door, _, text in (each.partition("\n") for each in done.stdout.split("door: ")[1:])}


@pytest.mark.parametrize("door", DOORS)
def test_what_has_no_memory_of_its_own_is_refused_by_name_and_nothing_is_published(door: str, told: dict[str, str]) -> None:
    assert "0 is how it ended" in told[door].splitlines(), told[door]
    assert "Unsupported" in told[door]
    assert " w" in told[door]
    assert "['plain']" in told[door]

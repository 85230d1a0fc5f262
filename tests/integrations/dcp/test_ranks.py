"""DCP's ranks over a store: what ranks of any parallelism saved comes back on any others, bit for bit."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import difference
from tests.session.group.boxed import Boxed
from tests.session.group.pool import GROUPS, Pool, opened
from tests.session.group.test_reshard import WAYS, Flat, full_tensors, spoil, state_of

NOT_DCPS = {"strided and replicated 2x2", "3-D 2x2x2"}
"""A share in several boxes, which DCP cannot plan."""
WAYS_OF_DCP = {
    name: found for name, found in WAYS.items() if not isinstance(found[1], Flat) and found[1] != Boxed() and name not in NOT_DCPS
}


def save_by_each(folder: str) -> dict[str, str]:
    """Way -> root, on the coordinator."""
    rank, roots = dist.get_rank(), {}
    for name, (ranks, way) in WAYS_OF_DCP.items():
        if rank < ranks:
            writer = Writer(opened(folder, ranks), name.replace(" ", "-").replace(",", ""))
            dcp.save(state_of(way, rank, ranks, 7), storage_writer=writer, process_group=GROUPS[ranks], checkpoint_id="step-7")
            assert (writer.snapshot is not None) == (rank == 0)
            roots[name] = writer.snapshot.root if writer.snapshot else ""
    return roots


def load_by_each(folder: str, roots: dict[str, str]) -> None:
    """Each way what another one saved."""
    rank, names = dist.get_rank(), list(roots)
    for number, name in enumerate(names):
        ranks, way = WAYS[name]
        if rank < ranks:
            target = state_of(way, rank, ranks, 7)
            spoil(target)
            target["step"] = 0
            dcp.load(target, storage_reader=Reader(opened(folder, ranks), roots[names[number - 4]]), process_group=GROUPS[ranks])
            expected = state_of(way, rank, ranks, 7)
            assert difference(dict(sorted(expected.items())), dict(sorted(target.items()))) is None, f"as {name}"


def test_saved_by_some_ranks_loaded_by_others(pool: Pool, folder: Path) -> None:
    roots = pool.run(save_by_each, str(folder))[0]
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        for name, root in roots.items():
            assert difference({"step": 7, "model": full_tensors(7)}, store.checkout(root)) is None, name
        assert store.fsck(read_data=True).ok
    pool.run(load_by_each, str(folder), roots)


# --- what a rank reads ------------------------------------------------------------------------------------------------------

ROWS, COLUMNS = 16, 2000


def rows_of_each(ranks: int, fill: float) -> dict[str, torch.Tensor]:
    mesh = DeviceMesh("cpu", list(range(ranks)))
    return {"weight": DTensor.from_local(torch.full((ROWS, COLUMNS), fill), mesh, [Shard(0)], run_check=False)}


def save_rows(folder: str, ranks: int) -> None:
    writer = Writer(f"{folder}/store", "run", cache_dir=f"{folder}/cache-{dist.get_rank()}")
    dcp.save(rows_of_each(ranks, float(dist.get_rank())), storage_writer=writer, process_group=GROUPS[ranks], checkpoint_id="step-1")


def parts_read(folder: str, ranks: int) -> int:
    read, target = set[str](), rows_of_each(ranks, -1.0)

    def get(self: LocalBackend, name: str, *, max_bytes: int, original: Any = LocalBackend.get) -> bytes:
        read.update([name] if name.startswith("parts/") else [])
        data: bytes = original(self, name, max_bytes=max_bytes)
        return data

    reader = Reader(f"{folder}/store", "run", cache_dir=f"{folder}/cache-{dist.get_rank()}")
    with patch.object(LocalBackend, "get", get):
        dcp.load(target, storage_reader=reader, process_group=GROUPS[ranks])
    assert isinstance(target["weight"], DTensor)
    assert bool((target["weight"].to_local() == dist.get_rank()).all())
    return len(read)


def test_each_rank_reads_the_first_part_and_its_own(pool: Pool, folder: Path) -> None:
    pool.run(save_rows, str(folder), 8, ranks=8)
    assert pool.run(parts_read, str(folder), 8, ranks=8) == [1, 2, 2, 2, 2, 2, 2, 2]

"""What DCP stored is a snapshot like any other, any other can be read through DCP, and ranks load what any others saved."""

from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import blank, difference
from tests.session.group.boxed import Boxed
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store, opened
from tests.session.group.test_reshard import WAYS, Flat, full_tensors, spoil, state_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

SEED = 7


def put_native(folder: str, name: str, ref: str) -> tuple[str, int]:
    ranks, way = WAYS[name]
    state = state_of(way, dist.get_rank(), ranks, SEED)
    put = opened(folder, ranks, cache=0).put_snapshot(state, ref=ref, expect=tsck.ANY, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    return put.root, put.new_bytes


def load_dcp(folder: str, address: str, name: str) -> None:
    ranks, way = WAYS[name]
    rank = dist.get_rank()
    target = state_of(way, rank, ranks, SEED)
    spoil(target)
    target["step"] = 0
    dcp.load(target, storage_reader=Reader(f"{folder}/store", address, cache_dir=f"{folder}/cache-0"), process_group=GROUPS[ranks])
    assert difference(state_of(way, rank, ranks, SEED), target) is None


# --- the same state, both ways ------------------------------------------------------------------------------------------


def on_the_grid() -> dict[str, torch.Tensor]:
    """Borders of shares fall between blocks."""
    generator = torch.Generator().manual_seed(1)
    return {f"w{number}": torch.randn(1024, 64, generator=generator) for number in range(4)}


def grid_state(name: str) -> dict[str, Any]:
    ranks, way = WAYS[name]
    return {"step": 7, "model": {key: way.share(tensor, dist.get_rank(), ranks) for key, tensor in on_the_grid().items()}}


def put_grid(folder: str, name: str) -> tuple[str, int]:
    ranks, _ = WAYS[name]
    put = opened(folder, ranks, cache=0).put_snapshot(grid_state(name), ref="job", expect=tsck.ANY, group=GROUPS[ranks], codec="raw")
    return put.root, put.new_bytes


def save_grid(folder: str, name: str) -> tuple[str, int]:
    writer = Writer(f"{folder}/store", "job", cache_dir=f"{folder}/cache-0", codec="raw")
    dcp.save(grid_state(name), storage_writer=writer, process_group=GROUPS[WAYS[name][0]])
    return (writer.snapshot.root, writer.snapshot.new_bytes) if writer.snapshot else ("", 0)


@pytest.mark.parametrize(("name", "is_native_first"), [("fsdp 2", True), ("hsdp 2x4", False), ("ddp 4", True)])
def test_the_same_blocks(pool: Pool, tmp_path: Path, name: str, is_native_first: bool) -> None:
    make_store(tmp_path)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-0") as store:
        store.put_snapshot({}, ref="other")  # hosts note blocks from the first entry of a log on
    ranks, _ = WAYS[name]
    ways = [put_grid, save_grid] if is_native_first else [save_grid, put_grid]
    (root, new), (again, added) = [pool.run(way, str(tmp_path), name, ranks=ranks)[0] for way in ways]
    assert new > 4 * 1024 * 64 * 4
    assert added < new // 20
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache-0") as store:
        found = store.diff(root, again)
        assert (found.tensors, found.values, found.unchanged_tensors, found.unchanged_values) == ((), (), 4, 1)
        store.gc()
        for address in (root, again):
            assert difference({"step": 7, "model": on_the_grid()}, store.checkout(address)) is None
        assert store.fsck(read_data=True).ok


@pytest.mark.parametrize(("name", "other"), [("flat 3", "tp 3, columns"), ("3-D 2x2x2", "fsdp 2")])
def test_any_layout_of_a_save_is_read(pool: Pool, folder: Path, name: str, other: str) -> None:
    """Also those that DCP itself cannot save."""
    root, _ = pool.run(put_native, str(folder), name, "native", ranks=WAYS[name][0])[0]
    pool.run(load_dcp, str(folder), root, other, ranks=WAYS[other][0])


def test_a_save_of_one_process_is_read(tmp_path: Path) -> None:
    weight = torch.randn(40, 30)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "tied": {"a": weight, "b": weight, "view": weight[3:5, 2:], "transposed": weight.t()},
        "views": list(torch.arange(12.0).view(3, 4).unbind()),
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "array": np.arange(6).reshape(2, 3),
        "tuple": (torch.ones(2), {"a": np.ones(2)}),
        "ordered": OrderedDict(b=1, a=torch.ones(2)),
        "empty": {},
        "list": [[], None, {"a": torch.ones(1)}],
        "big": 2**100,
        "rng": torch.get_rng_state(),
        "half": torch.randn(7).bfloat16(),
        "scalar": torch.tensor(2.5),
        "none": torch.empty(0, 3),
    }
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot(state, ref="native", step=3)
        target = blank(state)
        dcp.load(target, storage_reader=Reader(store, "native"), no_dist=True)
        assert difference(plain(state), plain(target)) is None


def plain(value: Any) -> Any:
    """As DCP gives it back."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, torch.nn.Parameter):
        return value.detach().requires_grad_(value.requires_grad)
    return value


def test_no_dict(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True) as store:
        store.put_snapshot([1, 2], ref="list")
        with pytest.raises(dcp.api.CheckpointException, match="checkout"):
            dcp.load({"a": 1}, storage_reader=Reader(store, "list"), no_dist=True)


def test_lineage_after_going_back(tmp_path: Path) -> None:
    with tsck.open(tmp_path / "store", create=True) as store:
        writer = Writer(store, "job")
        roots = []
        for step in range(3):
            dcp.save({"a": torch.full((3,), float(step))}, storage_writer=writer, checkpoint_id=f"step-{step}", no_dist=True)
            assert writer.snapshot is not None
            assert writer.snapshot.step == step
            roots.append(writer.snapshot.root)
        state = {"a": torch.zeros(3)}
        dcp.load(state, storage_reader=Reader(store, "job"), checkpoint_id="step-1", no_dist=True)
        assert state["a"].tolist() == [1.0] * 3
        dcp.save({"a": torch.full((3,), 9.0)}, storage_writer=writer, checkpoint_id="step-2", no_dist=True)
        assert writer.snapshot is not None
        assert writer.snapshot.parent == roots[1]
        store.put_snapshot({"a": 1}, ref="job")  # the same handle: not fenced off


def put_after_dcp(folder: str) -> None:
    """On the same handles, of which only the coordinator's reads what DCP published: the save says where the ref is."""
    store = opened(folder, 2)
    mine = state_of(WAYS["fsdp 2"][1], dist.get_rank(), 2, SEED)
    dcp.save(mine, storage_writer=Writer(store, "mixed"), process_group=GROUPS[2])
    store.put_snapshot(mine, ref="mixed", expect="mixed", group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS)
    dcp.save(mine, storage_writer=Writer(store, "mixed"), process_group=GROUPS[2])


def test_puts_and_saves_of_the_same_handles(pool: Pool, tmp_path: Path) -> None:
    make_store(tmp_path)
    pool.run(put_after_dcp, str(tmp_path), ranks=2)
    with tsck.open(tmp_path / "store") as store:
        assert len(store.log("mixed")) == 3


# --- ranks of any parallelism ---------------------------------------------------------------------------------------------


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


@pytest.mark.slow
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

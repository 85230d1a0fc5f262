"""What DCP stored is a snapshot like any other, and any other snapshot can be read through DCP."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import blank, difference
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store, opened
from tests.session.group.test_reshard import WAYS, spoil, state_of

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

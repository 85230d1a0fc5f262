"""Ranks of any parallelism restore a snapshot that ranks of another one saved, bit by bit as the full tensors have it."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.read.block_reader import MAX_GAP_BYTES
from tests.effort import effort
from tests.session.group.boxed import Boxed
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, local_of, make_store, opened

# --- what is spread, and how --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mesh:
    """DTensors: as `distribute_tensor` makes them."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    is_transposed: bool = False
    """In memory."""

    def share(self, full: torch.Tensor, rank: int, ranks: int) -> Any:
        mesh = DeviceMesh("cpu", torch.arange(ranks).view(self.shape), _init_backend=False)
        placements = [Replicate() if getattr(each, "dim", 0) >= max(full.ndim, 1) or not full.ndim else each for each in self.placements]
        shared = distribute_tensor(full, mesh, placements, src_data_rank=None)
        if self.is_transposed and full.ndim == 2:
            local = shared.to_local().t().contiguous().t()
            return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
        return shared


@dataclass(frozen=True)
class Flat:
    """Flat shards of about equal size, with borders anywhere: ZeRO, FSDP1, Megatron. `skip` ranks in the middle have none."""

    skip: int = 0

    def share(self, full: torch.Tensor, rank: int, ranks: int) -> Any:
        ends = [full.numel() * (at if at * 2 < ranks else max(at - self.skip, 0)) // (ranks - self.skip) for at in range(ranks + 1)]
        ends = sorted(ends)
        return tsck.FlatShard(full.flatten()[ends[rank] : ends[rank + 1]].clone(), tuple(full.shape), ends[rank])


@dataclass(frozen=True)
class Boxes:
    """ShardedTensors, in chunks along dim 0, as FSDP1's SHARDED_STATE_DICT has them; dealt out from the last rank."""

    def share(self, full: torch.Tensor, rank: int, ranks: int) -> Any:
        if not full.numel() or not full.ndim:
            return full.clone()
        rows = full.shape[0]
        ends = [rows * at // ranks for at in range(ranks + 1)]
        own, every = [], []
        for other, (start, stop) in enumerate(reversed(list(pairwise(ends)))):
            if stop > start:
                offsets = [start] + [0] * (full.ndim - 1)
                shard = LocalShard.from_tensor_and_offsets(full[start:stop].clone(), offsets, other)
                own += [shard] * (other == rank)
                every.append(shard.metadata)
        metadata = ShardedTensorMetadata(every, full.shape, TensorProperties(dtype=full.dtype))
        return ShardedTensor._init_from_local_shards_and_global_metadata(own, metadata, process_group=GROUPS[ranks])


@dataclass(frozen=True)
class Whole:
    """Plain tensors, the same on all ranks: DDP."""

    def share(self, full: torch.Tensor, rank: int, ranks: int) -> Any:
        return full.clone()


Way = Mesh | Flat | Boxes | Boxed | Whole

FSDP = {f"fsdp {ranks}": (ranks, Mesh((ranks,), (Shard(0),))) for ranks in (1, 2, 3, 4, 8)}
WAYS: dict[str, tuple[int, Way]] = {
    **FSDP,
    "tp 4, columns": (4, Mesh((4,), (Shard(1),))),
    "tp 3, columns": (3, Mesh((3,), (Shard(1),))),
    "fsdp 2, transposed": (2, Mesh((2,), (Shard(0),), is_transposed=True)),
    "hsdp 2x4": (8, Mesh((2, 4), (Replicate(), Shard(0)))),
    "2-D 2x2": (4, Mesh((2, 2), (Shard(0), Shard(1)))),
    "2-D 4x2, rows twice": (8, Mesh((4, 2), (Shard(0), Shard(0)))),
    "fsdp over tp 2x2": (4, Mesh((2, 2), (_StridedShard(0, split_factor=2), Shard(0)))),
    "strided and replicated 2x2": (4, Mesh((2, 2), (_StridedShard(0, split_factor=2), Replicate()))),
    "3-D 2x2x2": (8, Mesh((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0)))),
    "replicated 3": (3, Mesh((3,), (Replicate(),))),
    "ddp 4": (4, Whole()),
    "flat 3": (3, Flat()),
    "flat 4, two without": (4, Flat(skip=2)),
    "flat 8": (8, Flat()),
    "sharded tensor 4": (4, Boxes()),
    "sharded tensor 3": (3, Boxes()),
    "boxes 3": (3, Boxed()),
    "boxes in one buffer 4": (4, Boxed(in_one_buffer=True)),
}


def full_tensors(seed: int) -> dict[str, torch.Tensor]:
    """The whole state. No two elements that should not be are equal, as far as the dtype allows."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int32)

    return {
        "weight": numbers(64, 48).view(torch.float32),
        "uneven": numbers(37, 50).view(torch.float32),
        "few": numbers(3, 1100),
        "one": numbers(1, 9),
        "experts": numbers(8, 21, 30).view(torch.bfloat16),
        "long": numbers(5003).to(torch.int64),
        "wide": numbers(2, 3001),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(float(seed)),
        "flags": numbers(7, 11) > 0,
    }


def state_of(way: Way, rank: int, ranks: int, seed: int) -> dict[str, Any]:
    """A rank's side of the state."""
    return {"step": seed, "model": {name: way.share(full, rank, ranks) for name, full in full_tensors(seed).items()}}


def spoil(state: Mapping[str, Any]) -> None:
    """So that what is not restored is noticed."""
    for value in state["model"].values():
        for local in local_of(value):
            local.detach().zero_()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes: NaNs are equal."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def require_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found["step"] == expected["step"]
    assert list(found["model"]) == list(expected["model"])
    for name, value in expected["model"].items():
        own, other = local_of(found["model"][name]), local_of(value)
        assert len(own) == len(other)
        for one, two in zip(own, other, strict=True):
            assert one.shape == two.shape, name
            assert one.dtype == two.dtype, name
            assert torch.equal(bits(one), bits(two)), name


# --- what a rank does ---------------------------------------------------------------------------------------------------


def put(folder: str, name: str, seed: int = 7) -> str:
    ranks, way = WAYS[name]
    rank = torch.distributed.get_rank()
    store = opened(folder, ranks)
    state = state_of(way, rank, ranks, seed)
    own = {"rng": torch.tensor([seed, rank])}
    return store.put_snapshot(
        state, ref=name.replace(" ", "-").replace(",", ""), step=seed, group=GROUPS[ranks], rank_state=own, timeout_seconds=TIMEOUT_SECONDS
    ).root


def restore_each(folder: str, root: str, names: list[str], seed: int = 7) -> None:
    """Into other ways, one after the other."""
    rank = torch.distributed.get_rank()
    for name in names:
        ranks, way = WAYS[name]
        if rank >= ranks:
            continue
        target = state_of(way, rank, ranks, seed)
        spoil(target)
        target["step"] = 0
        restored = opened(folder, ranks).checkout(root, into=target, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
        try:
            require_same(restored, state_of(way, rank, ranks, seed))
        except AssertionError as exc:
            exc.add_note(f"as {name}")
            raise


# --- tests --------------------------------------------------------------------------------------------------------------


def targets(name: str) -> list[str]:
    """Itself and four others, in turns. That any region fills any box is shown in `test_block_assignment`."""
    names = list(WAYS)
    return effort([names[(names.index(name) + step) % len(names)] for step in (0, 1, 4, 9, 15)], names)


@pytest.mark.parametrize("name", WAYS)
def test_any_parallelism_to_any_other(pool: Pool, folder: Path, name: str) -> None:
    ranks, _ = WAYS[name]
    roots = set(pool.run(put, str(folder), name, ranks=ranks))
    assert len(roots) == 1
    (root,) = roots
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        restored = store.checkout(root)
        full = full_tensors(7)
        require_same(restored, {"step": 7, "model": full})
        spoil(restored)
        require_same(store.checkout(root, into=restored), {"step": 7, "model": full})
    pool.run(restore_each, str(folder), root, targets(name))


# --- rank states, refusals, dedup ---------------------------------------------------------------------------------------


def own_state(folder: str, address: str, ranks: int) -> Any:
    return opened(folder, ranks).rank_state(address, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)


def test_rank_states_come_back_to_their_ranks(pool: Pool, folder: Path) -> None:
    root = pool.run(put, str(folder), "fsdp 3", 11, ranks=3)[0]
    for rank, own in enumerate(pool.run(own_state, str(folder), root, 3, ranks=3)):
        assert own["rng"].tolist() == [11, rank]
    for error in pool.ask(own_state, str(folder), root, 2, ranks=2):
        assert isinstance(error, tsck.StoreError)
        assert "states of 3 ranks, and there are 2 now" in str(error)
    with tsck.open(folder / "store", cache_dir=folder / "cache") as store:
        assert store.rank_state(root, 2)["rng"].tolist() == [11, 2]


def put_partial(folder: str) -> str:
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False)
    state = {"model": {"w": DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)}}
    return opened(folder, 2).put_snapshot(state, ref="partial", group=GROUPS[2], timeout_seconds=TIMEOUT_SECONDS).root


def test_partial_is_refused(pool: Pool, folder: Path) -> None:
    for error in pool.ask(put_partial, str(folder), ranks=2):
        assert isinstance(error, tsck.UnsupportedValueError)
        assert "model.w is a DTensor with the placement Partial(sum)" in str(error)
        assert "redistribute it first" in str(error)


def test_tensors_are_stored_once_however_many_ranks_save_them(pool: Pool, tmp_path: Path) -> None:
    """On one host, and where the borders of shares fall on the grid."""
    make_store(tmp_path)
    new = [pool.run(put_on_the_grid, str(tmp_path), ranks, ranks=ranks)[0] for ranks in (2, 4, 8)]
    assert new[0] > 1024 * 256 * 4
    assert max(new[1:]) < 1024 * 256 * 4 // 10  # parts and layouts alone


def put_on_the_grid(folder: str, ranks: int) -> int:
    full = {"w": torch.randn(1024, 256, generator=torch.Generator().manual_seed(1))}
    rank = torch.distributed.get_rank()
    store = opened(folder, ranks, cache=0)
    state = {name: Mesh((ranks,), (Shard(0),)).share(tensor, rank, ranks) for name, tensor in full.items()}
    put = store.put_snapshot(state, ref="job", expect=tsck.ANY, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS, codec="raw")
    return put.new_bytes


# --- what is read -------------------------------------------------------------------------------------------------------

READS: list[tuple[str, int, int]] = []
"""In a rank's process: (pack, offset, bytes) of what it reads."""


PLAIN_READ = LocalBackend.read_into


def count_reads(is_on: bool) -> None:
    def read_into(self: LocalBackend, name: str, offset: int, target: memoryview) -> None:
        READS.append((name, offset, len(target)))
        PLAIN_READ(self, name, offset, target)

    LocalBackend.read_into = read_into if is_on else PLAIN_READ  # type: ignore[method-assign]
    LocalBackend.is_local = not is_on  # only what comes from far is passed on


def large_state(way: Way, rank: int, ranks: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(1030, 150), (257, 512), (70, 70, 35), (200_003,)]
    tensors = {f"t{number}": torch.randn(shape, generator=generator) for number, shape in enumerate(shapes)}
    return {name: way.share(tensor, rank, ranks) for name, tensor in tensors.items()}


def put_large(folder: str, name: str) -> str:
    ranks, way = WAYS[name]
    state = large_state(way, torch.distributed.get_rank(), ranks)
    return opened(folder, ranks).put_snapshot(state, ref="large", expect=tsck.ANY, group=GROUPS[ranks]).root


def restore_large(folder: str, root: str, name: str) -> tuple[int, list[tuple[str, int, int]]]:
    """(bytes needed, what was read)."""
    ranks, way = WAYS[name]
    target = large_state(way, torch.distributed.get_rank(), ranks)
    READS.clear()
    opened(folder, ranks).checkout(root, into=target, group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
    return sum(local.nbytes for value in target.values() for local in local_of(value)), list(READS)


def covered(reads: list[tuple[str, int, int]]) -> int:
    """Bytes that were read at least once."""
    total, ends = 0, dict.fromkeys((pack for pack, _, _ in reads), 0)
    for pack, offset, length in sorted(reads):
        total += max(offset + length - max(offset, ends[pack]), 0)
        ends[pack] = max(ends[pack], offset + length)
    return total


@pytest.mark.parametrize(
    "name",
    ["3-D 2x2x2", "flat 3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tp 4, columns", "strided and replicated 2x2"))],
)
def test_what_is_needed_is_read_once(pool: Pool, tmp_path: Path, name: str) -> None:
    """By each rank hardly more than it needs when the ranks are those that save; else whole blocks, each of them by one rank of a host."""
    make_store(tmp_path, 2 * MAX_GAP_BYTES)
    ranks, _ = WAYS[name]
    pool.run(count_reads, True)
    try:
        root = pool.run(put_large, str(tmp_path), name, ranks=ranks)[0]
        for other in ("fsdp 3", "tp 3, columns", name):
            others, _ = WAYS[other]
            answers = pool.run(restore_large, str(tmp_path), root, other, ranks=others)
            reads = [read for _, own in answers for read in own]
            assert sum(length for _, _, length in reads) <= 1.05 * covered(reads), other
            if other == name:
                for needed, own in answers:
                    assert sum(length for _, _, length in own) <= 1.05 * needed
    finally:
        pool.run(count_reads, False)


def test_small_blocks_are_shared_in_runs(pool: Pool, tmp_path: Path) -> None:
    """Ranks of a host that took every second block would read what lies between, too."""
    make_store(tmp_path)
    pool.run(count_reads, True)
    try:
        root = pool.run(put_large, str(tmp_path), "ddp 4", ranks=4)[0]
        answers = pool.run(restore_large, str(tmp_path), root, "ddp 4", ranks=4)
        reads = [read for _, own in answers for read in own]
        assert sum(length for _, _, length in reads) <= 1.05 * covered(reads)
    finally:
        pool.run(count_reads, False)

"""All ranks learn of a failure of one rank, nothing of it is visible, and the next save works."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

import tensorstore_ck as tsck
from tensorstore_ck.integrations.dcp import Reader, Writer
from tests.integrations.dcp.dcp_states import causes, clear_plan_cache, difference
from tests.session.group.pool import GROUPS, Pool

RANKS = 2
WRITERS: dict[str, Writer] = {}
"""In a rank's process: they are kept for a whole run."""


class Odd:
    """No state_dict, and nothing that could be stored."""


def sharded(rows: int = 6, seed: int = 0) -> Any:
    full = torch.randn(rows, 40, generator=torch.Generator().manual_seed(seed))
    return distribute_tensor(full, DeviceMesh("cpu", torch.arange(RANKS), _init_backend=False), [Shard(0)], src_data_rank=None)


def writer_of(folder: str, name: str, ref: str) -> Writer:
    if name not in WRITERS:
        WRITERS[name] = Writer(f"{folder}/store", ref, cache_dir=f"{folder}/cache-{dist.get_rank()}")
    return WRITERS[name]


class Unresolved(DefaultSavePlanner):
    def resolve_data(self, write_item: WriteItem) -> Any:
        if dist.get_rank() == 1:
            raise OSError("rank 1 lost its data")
        return super().resolve_data(write_item)


def unsupported(kind: str) -> dict[str, Any]:
    rank = dist.get_rank()
    odd: dict[str, Callable[[], Any]] = {"instance": Odd, "sparse": lambda: torch.eye(3).to_sparse()}
    return {"model": {"w": sharded()}, f"own_{rank}": odd[kind]() if rank == 1 else 1, "both": torch.ones(500)}


def save_unsupported(folder: str, kind: str) -> None:
    dcp.save(unsupported(kind), storage_writer=writer_of(folder, "unsupported", "unsupported"), process_group=GROUPS[RANKS])


def save_plain(folder: str, name: str, ref: str, seed: int = 0, planner: SavePlanner | None = None) -> None:
    dcp.save(
        {"model": {"w": sharded(seed=seed)}}, storage_writer=writer_of(folder, name, ref), process_group=GROUPS[RANKS], planner=planner
    )


@pytest.mark.parametrize("kind", ["instance", "sparse"])
def test_what_cannot_be_stored_is_refused_by_name_on_all_ranks(pool: Pool, folder: Path, kind: str) -> None:
    errors = pool.ask(save_unsupported, str(folder), kind, ranks=RANKS)
    for error in errors:
        assert isinstance(error, CheckpointException), error
        assert "own_1" in str(error)
        assert all(isinstance(cause, tsck.UnsupportedValueError) for cause in causes(error)), causes(error)
    with tsck.open(folder / "store", cache_dir=folder / "cache-0") as store, pytest.raises(tsck.NotFoundError):
        store.checkout("unsupported~0" if kind == "instance" else "unsupported~99")
    pool.run(save_plain, str(folder), "unsupported", f"then-{kind}", ranks=RANKS)


def save_unresolved(folder: str) -> None:
    dcp.save({"w": sharded()}, storage_writer=writer_of(folder, "lost", "lost"), process_group=GROUPS[RANKS], planner=Unresolved())


def test_a_rank_that_raises(pool: Pool, folder: Path) -> None:
    for error in pool.ask(save_unresolved, str(folder), ranks=RANKS):
        assert isinstance(error, CheckpointException)
        assert "rank 1 lost its data" in str(error)
    with tsck.open(folder / "store", cache_dir=folder / "cache-0") as store:
        with pytest.raises(tsck.NotFoundError):
            store.checkout("lost")
        pool.run(save_plain, str(folder), "lost", "lost", ranks=RANKS)
        assert store.checkout("lost")["model"]["w"].shape == (6, 40)
        assert store.fsck(read_data=True).ok


def save_out_of_step(folder: str, calls: list[tuple[str, int]]) -> None:
    """Rank 1 has left out a call."""
    ref, step = calls[dist.get_rank()]
    writer = writer_of(folder, ref, ref)
    dcp.save({"w": sharded(seed=step)}, storage_writer=writer, process_group=GROUPS[RANKS], checkpoint_id=f"step-{step}")


@pytest.mark.parametrize("calls", [[("steps", 7), ("steps", 8)], [("model", 7), ("ema", 7)]], ids=["steps", "branches"])
def test_ranks_out_of_step_publish_nothing(pool: Pool, folder: Path, calls: list[tuple[str, int]]) -> None:
    for error in pool.ask(save_out_of_step, str(folder), calls, ranks=RANKS):
        assert [type(cause) for cause in causes(error)] == [tsck.InvalidOptionError]
        assert "rank 0: {!r}, step {}; rank 1: {!r}, step {}".format(*calls[0], *calls[1]) in str(error)
    with tsck.open(folder / "store", cache_dir=folder / "cache-0") as store:
        assert not {ref for ref, _ in calls} & store.branches().keys()
    pool.run(save_plain, str(folder), calls[0][0], calls[0][0], ranks=RANKS)


def save_apart(folder: str) -> None:
    rank = dist.get_rank()
    writer = Writer(f"{folder}/apart-{rank}", "apart", cache_dir=f"{folder}/cache-apart-{rank}")
    dcp.save({"w": sharded(rows=2000)}, storage_writer=writer, process_group=GROUPS[RANKS])


def test_ranks_with_stores_of_their_own_publish_nothing(pool: Pool, tmp_path: Path) -> None:
    """Such as a folder on each host's own disk."""
    for rank in range(RANKS):
        tsck.open(tmp_path / f"apart-{rank}", create=True, cache_dir=tmp_path / "cache").close()
    for error in pool.ask(save_apart, str(tmp_path), ranks=RANKS):
        assert [type(cause) for cause in causes(error)] == [tsck.InvalidOptionError]
        assert "open one that all hosts share" in str(error)
    with tsck.open(tmp_path / "apart-0", cache_dir=tmp_path / "cache") as store:
        assert not store.branches()


def test_a_stale_writer_is_refused(pool: Pool, folder: Path) -> None:
    """A job that was given up for dead continues while its successor runs."""
    pool.run(save_plain, str(folder), "old", "fenced", 1, ranks=RANKS)
    pool.run(save_plain, str(folder), "new", "fenced", 2, ranks=RANKS)
    for error in pool.ask(save_plain, str(folder), "old", "fenced", 3, ranks=RANKS):
        assert [type(cause) for cause in causes(error)] == [tsck.ConflictError]
    pool.run(save_plain, str(folder), "new", "fenced", 4, ranks=RANKS)
    with tsck.open(folder / "store", cache_dir=folder / "cache-0") as store:
        assert len(store.log("fenced")) == 3


@pytest.mark.skipif(torch.__version__ < "2.12", reason="its planner caches a rank's plan before it knows that all have one")
def test_after_a_refused_save_plans_are_not_cached_by_half(pool: Pool, folder: Path) -> None:
    """With the planner's cache: the ranks must not take the coordinator's word for plans that they never got."""
    pool.run(save_plain, str(folder), "stale", "cached", 1, ranks=RANKS)
    pool.run(save_plain, str(folder), "fresh", "cached", 2, ranks=RANKS)
    assert all(isinstance(error, CheckpointException) for error in pool.ask(save_cached, str(folder), "stale", 3, ranks=RANKS))
    pool.run(save_cached, str(folder), "fresh", 4, ranks=RANKS)
    pool.run(save_cached, str(folder), "fresh", 5, ranks=RANKS)
    pool.run(clear_plan_cache, ranks=RANKS)


class Cached(DefaultSavePlanner):
    """Has a cache of its own."""

    def __init__(self) -> None:
        super().__init__(enable_plan_caching=True)


def save_cached(folder: str, name: str, seed: int) -> None:
    save_plain(folder, name, "cached", seed, Cached())


# --- loading ------------------------------------------------------------------------------------------------------------


def load(folder: str, address: str, **options: Any) -> Any:
    state = {"model": {"w": sharded()}}
    reader = Reader(f"{folder}/store", address, cache_dir=f"{folder}/cache-{dist.get_rank()}", **options)
    dcp.load(state, storage_reader=reader, process_group=GROUPS[RANKS])
    return difference({"model": {"w": sharded(seed=1)}}, state)


def test_nothing_there(pool: Pool, folder: Path) -> None:
    for error in pool.ask(load, str(folder), "runs/none", ranks=RANKS):
        assert [type(cause) for cause in causes(error)] == [tsck.NotFoundError] * RANKS
        assert "runs/none" in str(error)


def test_marked_bad(pool: Pool, folder: Path) -> None:
    pool.run(save_plain, str(folder), "marked", "marked", 1, ranks=RANKS)
    with tsck.open(folder / "store", cache_dir=folder / "cache-0") as store:
        store.mark("marked", "bad", reason="loss spike")
    for error in pool.ask(load, str(folder), "marked", ranks=RANKS):
        assert [type(cause) for cause in causes(error)] == [tsck.SnapshotMarkedBadError] * RANKS
        assert "allow_marked=True" in str(error)
    assert pool.run(load_bad, str(folder), ranks=RANKS) == [None, None]


def load_bad(folder: str) -> Any:
    return load(folder, "marked", allow_marked=True)


def load_own_step(folder: str) -> None:
    load(folder, f"moved~{dist.get_rank()}")


def test_ranks_that_find_different_snapshots_load_none(pool: Pool, folder: Path) -> None:
    """As where the ref moves while they look."""
    for seed in (5, 6):
        pool.run(save_plain, str(folder), "moved", "moved", seed, ranks=RANKS)
    for error in pool.ask(load_own_step, str(folder), ranks=RANKS):
        assert {type(cause) for cause in causes(error)} == {tsck.ConflictError}


def save_large(folder: str) -> None:
    state = {"model": {"w": sharded(600, seed=1)}}
    dcp.save(state, storage_writer=Writer(f"{folder}/store", "damaged"), process_group=GROUPS[RANKS])


def load_large(folder: str) -> None:
    dcp.load({"model": {"w": sharded(600)}}, storage_reader=Reader(f"{folder}/store", "damaged"), process_group=GROUPS[RANKS])


def test_damaged_blocks(pool: Pool, tmp_path: Path) -> None:
    """Only one rank needs what is damaged."""
    pool.run(save_large, str(tmp_path), ranks=RANKS)
    pack = next(path for path in (tmp_path / "store" / "packs").rglob("*") if path.stat().st_size > 40_000)
    data = bytearray(pack.read_bytes())
    data[4000:8000] = bytes(4000)
    pack.chmod(0o644)
    pack.write_bytes(data)
    for error in pool.ask(load_large, str(tmp_path), ranks=RANKS):
        assert isinstance(error, CheckpointException)
        assert [isinstance(cause, tsck.DamageError) for cause in causes(error)] == [True], causes(error)


class Flaky(Reader):
    """Cannot read the metadata the first time on rank 1."""

    def read_metadata(self) -> Any:
        if dist.get_rank() == 1 and self.snapshot is None and not hasattr(self, "failed"):
            self.failed = True
            raise tsck.BackendUnavailableError("a passing fault")
        return super().read_metadata()


def load_flaky(folder: str) -> None:
    reader = Flaky(f"{folder}/store", "flaky", cache_dir=f"{folder}/cache-{dist.get_rank()}")
    dcp.load({"model": {"w": sharded()}}, storage_reader=reader, process_group=GROUPS[RANKS])


def test_a_passing_fault_on_one_rank_does_not_part_the_ranks(pool: Pool, folder: Path) -> None:
    """DCP has another way to read, without collectives, that one rank alone must not take."""
    pool.run(save_plain, str(folder), "flaky", "flaky", 1, ranks=RANKS)
    for error in pool.ask(load_flaky, str(folder), ranks=RANKS):
        assert isinstance(error, CheckpointException), error

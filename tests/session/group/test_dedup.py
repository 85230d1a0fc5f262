"""The same state saved by other numbers of ranks, each on a host of its own, is stored once: no host knows what the others have."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.dedup import matching_parts
from tensorstore_ck.format.sharding import Mesh, Shard
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, make_store
from tests.session.group.states import Spreading, captured, sharded, whole
from tests.session.group.stores import put_all, rank_state

ROWS = 1 << 22
"""Four bytes each: borders of 2, 4 and 8 ranks fall on the grid."""


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4)])
def test_other_ranks_on_other_hosts(tmp_path: Path, before: int, after: int) -> None:
    backend, array = MemoryBackend(), whole((ROWS,))

    def state(ranks: int, rank: int) -> CapturedState:
        return captured({"w": Spreading(array, sharded(0, Shard(0)))}, [Mesh((ranks,), tuple(range(ranks)))], rank, ranks)

    first = put_all(backend, before, lambda rank: state(before, rank), rank_state, step=1)
    second = put_all(backend, after, lambda rank: state(after, rank), rank_state, step=2)
    assert first.new_bytes > 4 * ROWS
    assert second.new_bytes < 20_000 * after


def test_each_part_is_read_about_once() -> None:
    for ranks_before in range(1, 9):
        for ranks in range(1, 9):
            read = [matching_parts(ranks_before, ranks_before, rank, ranks) for rank in range(ranks)]
            assert {part for parts in read for part in parts} == set(range(ranks_before))
            assert sum(map(len, read)) <= ranks_before + ranks
            own = [matching_parts(2 * ranks_before, ranks_before, ranks + rank, ranks) for rank in range(ranks)]
            assert {part for parts in own for part in parts} == set(range(ranks_before, 2 * ranks_before))
            assert not any(matching_parts(ranks_before, ranks_before, ranks + rank, ranks) for rank in range(ranks)), "no own states"


def put_to_a_new_ref(folder: str, staged: bool) -> tuple[str | None, int]:
    """A state that was restored together is saved to a new ref, after one rank has read something else; by handles that know no blocks."""
    rank, group, half = dist.get_rank(), GROUPS[2], 20_000
    full = torch.rand(2 * half, generator=torch.Generator().manual_seed(1))

    def state() -> dict[str, tsck.FlatShard]:
        return {"w": tsck.FlatShard(full[rank * half : (rank + 1) * half].clone(), (2 * half,), rank * half)}

    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}") as store:
        store.put_snapshot(state(), ref="base", step=9, group=group, timeout_seconds=TIMEOUT_SECONDS)
        if rank == 1:
            store.put_snapshot({"other": torch.zeros(3)}, ref="other")
    disk = f"{folder}/disk-{rank}" if staged else None
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/fresh-{rank}", staging=disk) as store:
        store.checkout("base", into=state(), group=group, timeout_seconds=TIMEOUT_SECONDS)
        if rank == 1:
            store.checkout("other")
        new = store.put_snapshot(state(), ref="new", step=0, group=group, timeout_seconds=TIMEOUT_SECONDS)
        return new.parent, new.new_bytes


@pytest.mark.parametrize("staged", [False, True])
def test_all_ranks_look_for_blocks_where_rank_0_does(pool: Pool, tmp_path: Path, staged: bool) -> None:
    make_store(tmp_path)
    for parent, new_bytes in pool.run(put_to_a_new_ref, str(tmp_path), staged, ranks=2):
        assert parent is None
        assert new_bytes < 20_000, "of 160,000"

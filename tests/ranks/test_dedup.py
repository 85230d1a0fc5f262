"""The same state put by other numbers of ranks, each on a host of its own, is stored once: no host knows what the others have."""

from pathlib import Path

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.knownblocks import alike_parts
from tensorstore_ck.layout import Captured
from tensorstore_ck.sharding import Mesh, Shard
from tests.ranks.states import Spreading, captured, sharded, whole
from tests.ranks.stores import put_all, rank_state

ROWS = 1 << 23
"""Four bytes each: borders of 2, 4 and 8 ranks fall on the grid."""


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (8, 4), (1, 4), (4, 1)])
def test_other_ranks_on_other_hosts(tmp_path: Path, before: int, after: int) -> None:
    backend, array = MemoryBackend(), whole((ROWS,))

    def state(ranks: int, rank: int) -> Captured:
        return captured({"w": Spreading(array, sharded(0, Shard(0)))}, [Mesh((ranks,), tuple(range(ranks)))], rank, ranks)

    first = put_all(backend, before, lambda rank: state(before, rank), rank_state, step=1)
    second = put_all(backend, after, lambda rank: state(after, rank), rank_state, step=2)
    assert first.new_bytes > 4 * ROWS
    assert second.new_bytes < 20_000 * after


def test_each_part_is_read_about_once() -> None:
    for ranks_before in range(1, 9):
        for ranks in range(1, 9):
            read = [alike_parts(ranks_before, ranks_before, rank, ranks) for rank in range(ranks)]
            assert {part for parts in read for part in parts} == set(range(ranks_before))
            assert sum(map(len, read)) <= ranks_before + ranks
            own = [alike_parts(2 * ranks_before, ranks_before, ranks + rank, ranks) for rank in range(ranks)]
            assert {part for parts in own for part in parts} == set(range(ranks_before, 2 * ranks_before))
            assert not any(alike_parts(ranks_before, ranks_before, ranks + rank, ranks) for rank in range(ranks)), "no own states"

"""Where only the parts say what each rank holds, a restore still opens few of them, wherever the borders are."""

import numpy as np
import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.interfaces import CapturedState, ListedSources, WantedBox
from tensorstore_ck.engine.read.block_reader import BufferTarget
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader, open_snapshot
from tensorstore_ck.format.layout import ExplicitRegions, Layout, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds
from tests.gc.stores import open_store
from tests.session.group.states import BytesSource, whole
from tests.session.group.stores import put_all

RANKS = 12
SIZES = [70_000, 9_000, 130_000, 1]
"""Of tensors that lie one after another in memory that all ranks share evenly, as FSDP1's flat parameters do."""
TENSORS = [whole((size,), number) for number, size in enumerate(SIZES)]
STARTS = np.cumsum([0, *SIZES])


def intervals(rank: int, ranks: int) -> list[tuple[int, int, int]]:
    """(tensor, start, stop) of what a rank holds."""
    total = int(STARTS[-1])
    first, last = total * rank // ranks, total * (rank + 1) // ranks
    found = [(number, max(first - start, 0), min(last - start, SIZES[number])) for number, start in enumerate(STARTS[:-1].tolist())]
    return [(number, start, stop) for number, start, stop in found if start < stop]


def state(rank: int) -> CapturedState:
    layout = Layout(
        [TensorSpec(f"t{number}", "np:<i4", 4, (size,)) for number, size in enumerate(SIZES)], ["l", [0, 1, 2, 3]], (), (), ["flat"] * 4
    )
    held = {number: (start, stop) for number, start, stop in intervals(rank, RANKS)}
    explicit = [
        ExplicitRegions(number, (BoxBounds((held[number][0],), (held[number][1] - held[number][0],)),) if number in held else ())
        for number in range(4)
    ]
    sources = [BytesSource(TENSORS[number][slice(*held.get(number, (0, 0)))].tobytes()) for number in range(4)]
    return CapturedState(layout, (), (), ListedSources(sources), explicit)


@pytest.mark.parametrize("ranks", [RANKS, 5, 24])
def test_few_parts_are_opened(ranks: int) -> None:
    backend = MemoryBackend()
    info = put_all(backend, RANKS, state)
    with open_store(backend) as store:
        store.engine.log.sync()
        for rank in range(ranks):
            reader = open_snapshot(store.engine, info, position=(rank + 0.5) / ranks)
            assert isinstance(reader, SnapshotReader)
            wanted = intervals(rank, ranks)
            memory = [bytearray(4 * (stop - start)) for _, start, stop in wanted]
            reader.read_boxes(
                WantedBox(number, BoxBounds((start,), (stop - start,)), BufferTarget(memoryview(data)))
                for (number, start, stop), data in zip(wanted, memory, strict=True)
            )
            assert [bytes(data) for data in memory] == [TENSORS[number][start:stop].tobytes() for number, start, stop in wanted]
            needed = {other for other in range(RANKS) for mine in wanted for theirs in intervals(other, RANKS) if meet(mine, theirs)}
            assert len(reader._parts) <= len(needed | {0}) + 2


def meet(one: tuple[int, int, int], other: tuple[int, int, int]) -> bool:
    return one[0] == other[0] and max(one[1], other[1]) < min(one[2], other[2])

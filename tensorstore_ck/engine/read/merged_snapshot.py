"""A snapshot whose ranks had several layouts, such as the stages of a pipeline, as one: see `union`.

That a tensor which several layouts have is one and the same is checked when it is put: see `ranks.stages`.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import ByteTarget, WantedBox
from tensorstore_ck.engine.read.block_reader import ReadBlocks, read_blocks
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import MismatchError, NotFoundError
from tensorstore_ck.format.block_assignment import first_ranks
from tensorstore_ck.format.layout_merge import LayoutConflictError, MergedLayout
from tensorstore_ck.format.sharding import whole_box
from tensorstore_ck.log import SnapshotInfo


def open_snapshot(
    engine: Engine, info: SnapshotInfo, read: ReadBlocks = read_blocks, *, place: float = 0.0
) -> "SnapshotReader | MergedSnapshot":
    """The snapshot, whatever the ranks that put it held. `read`, `place`: see `SnapshotReader`."""
    first = SnapshotReader(engine, info, 0, read, place=place)
    others = first_ranks(first.part.layout_of or b"")[1:]
    if not others:
        return first
    more = (SnapshotReader(engine, info, rank, read, place=place, record=first.record, budget=first.budget) for rank in others)
    return MergedSnapshot([first, *more])


def count_rank_states(engine: Engine, info: SnapshotInfo, world_size: int | None = None) -> int:
    """How many ranks put states of their own; `world_size` says how many it must be.

    Raises:
        NotFoundError: none.
        MismatchError: other than `world_size` ranks put them.
    """
    ranks = SnapshotReader(engine, info).world_size
    what = f"snapshot {info.root.hex()[:16]} (step {info.step})"
    if len(engine.read_record(info).parts) == ranks:
        raise NotFoundError(f"{what} has no rank states: it was put without rank_state=", object_id=info.root.hex())
    if world_size not in (None, ranks):
        raise MismatchError(
            f"{what} has the states of {ranks} ranks, and there are {world_size} now. Say whose each takes with rank_state_map=, seed "
            "new random streams with store.streams(), and keep a loader's position as a SampleCursor in the state that all ranks share",
            object_id=info.root.hex(),
        )
    return ranks


def open_rank_state(engine: Engine, info: SnapshotInfo, rank: int) -> SnapshotReader:
    """What is a rank's alone.

    Raises:
        NotFoundError: no rank states were put, or there is no such rank.
    """
    ranks = count_rank_states(engine, info)
    if not 0 <= rank < ranks:
        what = f"snapshot {info.root.hex()[:16]} (step {info.step})"
        raise NotFoundError(f"{what} has the states of {ranks} ranks, and there is no rank {rank}", object_id=str(rank))
    return SnapshotReader(engine, info, ranks + rank)


class MergedSnapshot:
    """`layout.Content` over the layouts of one snapshot. Thread-safe."""

    def __init__(self, readers: Sequence[SnapshotReader]) -> None:
        """Raises:
        MismatchError: the layouts contradict each other.
        """
        self.readers = readers
        try:
            merged = MergedLayout(readers)
        except LayoutConflictError as exc:
            names = " and ".join(readers[side].name for side in exc.parts)
            raise MismatchError(
                f"the ranks that put this snapshot had different things as {exc.path!r}: see {names}", object_id=exc.path
            ) from exc
        self.values: Sequence[Any] = merged.values
        self.layout = merged.layout
        self._places = merged.locations
        self._blobs = merged.blob_locations

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""
        reader, number = self._blobs[index]
        return self.readers[reader].blob(number)

    def read(self, targets: dict[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors, by their numbers in the layout."""
        tensors = self.layout.tensors
        self.read_boxes(WantedBox(tensor, whole_box(tensors[tensor].shape), target) for tensor, target in targets.items())

    def read_boxes(self, wanted: Iterable[WantedBox]) -> None:
        """Reads and verifies boxes of tensors."""
        of_reader: dict[int, list[WantedBox]] = {}
        for each in wanted:
            reader, tensor = self._places[each.tensor]
            of_reader.setdefault(reader, []).append(each._replace(tensor=tensor))
        self.readers[0].fetch([block for reader, boxes in of_reader.items() for block in self.readers[reader].blocks_of(boxes)])

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        """Verified bytes [start, stop) of a tensor."""
        reader, number = self._places[tensor]
        return self.readers[reader].read_range(number, start, stop)

"""The blocks whose bytes the follower's tensors have, so that nothing of them is read.

Blocks are known from the last version that was swapped in, or by hashing the tensors: a follower that begins with weights from a file
reads what differs from these.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from tensorstore_ck.common.ids import Digest, block_id
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.read.block_reader import WantedBlock
from tensorstore_ck.engine.read.box_copy import BoxTarget, index_in, runs
from tensorstore_ck.format.block_assignment import overlap

Place = tuple[object, ...]
"""Where a block lies in the follower's tensors: which ones, the region of them that was stored as one piece, and the first byte."""


class HeldBlocks:
    """Finds the bytes of blocks in the follower's tensors."""

    def __init__(self, known: Mapping[Place, Digest], wanted: Sequence[WantedBlock]) -> None:
        """`known`: of the version that the tensors are. Blocks of `wanted` at other places are hashed."""
        ids = {place_of(block): block for block in wanted}
        self._at: dict[Place, Digest] = {place: known[place] for place in ids if place in known}
        unknown = [(place, block) for place, block in ids.items() if place not in known]

        def look(task: tuple[Place, WantedBlock]) -> None:
            held = _bytes_at(task[1])
            if held is not None:
                self._at[task[0]] = block_id(held)

        for_each(unknown, look, min(cpu_threads(), len(unknown)))
        self._of = {digest: ids[place] for place, digest in self._at.items() if _is_whole(ids[place])}

    def missing(self, wanted: Iterable[WantedBlock]) -> list[WantedBlock]:
        """The blocks that are not where they belong already."""
        return [block for block in wanted if self._at.get(place_of(block)) != block.source.part.block_id(block.row)]

    def __contains__(self, block: Digest) -> bool:
        return block in self._of

    def read_in_place(self, block: WantedBlock, base: Digest) -> memoryview | None:
        """The bytes that the tensors have in the place of a block, which may have changed since they were `base`; None if they were not."""
        return _bytes_at(block) if self._at.get(place_of(block)) == base else None

    def read(self, block: Digest) -> memoryview | None:
        """The bytes of a held block, which may have changed since; None if they are in another dtype."""
        return _bytes_at(self._of[block])


def place_of(block: WantedBlock) -> Place:
    """Where a block belongs."""
    target: Any = block.target
    if isinstance(target, BoxTarget):
        region, tensor = target.region, target.target
        return tensor.identity, region.offsets, region.sizes, region.is_flat, block.start  # type: ignore[attr-defined]
    return target.identity, block.start


def _is_whole(block: WantedBlock) -> bool:
    """Whether the tensors have all of a block's place: a rank's share may end in the middle of it."""
    target: Any = block.target
    if not isinstance(target, BoxTarget):
        return True
    item_bytes = target.spec.item_bytes
    pieces = target.region.pieces(target.spec, block.start // item_bytes, (block.start + block.raw) // item_bytes)
    return all(overlap(piece, target.box) == piece for piece, _ in pieces)


def _bytes_at(block: WantedBlock) -> memoryview | None:
    """The bytes that the tensors have in the place of a block."""
    target: Any = block.target
    if isinstance(target, BoxTarget):
        return _gathered(target, block.start, block.raw) if _is_whole(block) else None
    held: memoryview | None = target.holds(block.start, block.start + block.raw)
    return held


def _gathered(box: BoxTarget, start: int, size_bytes: int) -> memoryview | None:
    """Bytes of a region of a tensor, which are spread over it."""
    item_bytes, tensor = box.spec.item_bytes, box.target
    gathered = np.empty(size_bytes, np.uint8)
    for piece, at in box.region.pieces(box.spec, start // item_bytes, (start + size_bytes) // item_bytes):
        elements = np.ndarray((*piece.sizes, item_bytes), np.uint8, gathered.data, at * item_bytes - start)
        for run, begin in runs(piece, box.box):
            held = tensor.holds(begin * item_bytes, (begin + prod(run.sizes)) * item_bytes)  # type: ignore[attr-defined]
            if held is None:
                return None
            elements[index_in(run, piece)] = np.frombuffer(held, np.uint8).reshape(*run.sizes, item_bytes)
    return gathered.data

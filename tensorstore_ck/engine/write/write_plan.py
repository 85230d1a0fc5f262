"""What a part stores of the tensors: which blocks, and which small tensors inside the part; and how the layout is cut.

A plan is the same for each save of one layout. Knows neither packs nor bytes.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.chunker import cut_opaque
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.interfaces import CapturedState, Numbers, SourceRanges, TensorBlock
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.block_assignment import BlockShare, Region, assign_blocks, encode_regions, regions_of_rank
from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES
from tensorstore_ck.format.sealed import MAX_BODY_BYTES

MAX_DERIVED: Final = 4
"""What is kept for a layout, plans and what others derive from it: where there is more, all of it is dropped before
another plan is made."""


class PartAuthor(NamedTuple):
    """The rank that writes a part, among the ranks of its snapshot."""

    rank: int
    world_size: int
    layout_ranks: tuple[int, ...]
    """The ranks that have the same layout, in order. The first of them stores the layout, and the values and large values of the state."""
    layout_of: bytes | None
    """See `Part.layout_of`."""


SINGLE: Final = PartAuthor(0, 1, (0,), None)


def only_author(captured: CapturedState) -> PartAuthor:
    """The author of a snapshot's only part; `layout_of` is set where regions are explicit: without it the part id would not cover them."""
    return SINGLE._replace(layout_of=b"") if captured.explicit else SINGLE


class InlineRun(NamedTuple):
    """Small tensors of one dtype that follow each other."""

    dtype: str
    item_bytes: int
    first: int
    """The position of the first of them among the small tensors."""
    stop: int
    data: slice
    """Where they lie in the part's inline bytes."""


class InlineTensors(NamedTuple):
    """The small tensors, or this rank's shares of them, inside a part, in order."""

    ranges: SourceRanges
    ends: Numbers
    """Where each ends in the part's inline bytes."""
    runs: Sequence[InlineRun]

    def place(self, number: int) -> slice:
        """Where the small tensor at this position lies in the part's inline bytes."""
        stop = int(self.ends[number])
        return slice(stop - int(self.ranges.sizes[number]), stop)

    def differing(self, data: Buffer, other: Buffer) -> list[int]:
        """The positions of the small tensors that differ between the inline bytes of two parts."""
        if data == other:
            return []
        is_other = np.frombuffer(data, np.uint8) != np.frombuffer(other, np.uint8)
        return np.flatnonzero(np.logical_or.reduceat(is_other, self.ends - self.ranges.sizes)).tolist()


class WritePlan(NamedTuple):
    """What a part stores of the tensors, and of the layout."""

    blocks: Sequence[TensorBlock]
    inlined: InlineTensors
    regions: bytes
    """The encoded explicit regions of this rank."""
    cuts: Mapping[int, bytes]
    """Which blocks of each frozen tensor this rank stores: another rank may store them at the next save."""
    layout_lengths: Sequence[int]
    """The lengths of the blocks of the encoded layout; none if another rank stores it."""


def plan_of(captured: CapturedState, author: PartAuthor, block_bytes: int) -> WritePlan:
    """The plan of a part; kept with what is derived from the layout.

    Raises:
        UnsupportedValueError: the small tensors are too many for one part.
    """
    regions = encode_regions(captured.explicit) if captured.explicit else b""
    kept = captured.derived if captured.derived is not None else {}
    key = (author.rank, author.layout_ranks, block_bytes, regions, *captured.frozen)
    plan: WritePlan | None = kept.get(key)
    if plan is None:
        if len(kept) > MAX_DERIVED:
            kept.clear()
        plan = kept[key] = _cut(
            captured, places_of(captured, author, block_bytes), regions, stores_layout=author.rank == author.layout_ranks[0]
        )
    return plan


def _cut(captured: CapturedState, places: Sequence[tuple[Region, int, BlockShare]], regions: bytes, *, stores_layout: bool) -> WritePlan:
    blocks, small, specs = list[TensorBlock](), list[tuple[int, int, int]](), captured.layout.tensors[:]
    cuts: dict[int, list[tuple[object, ...]]] = {}
    for region, start, share in places:
        if region.tensor in captured.frozen:
            cuts.setdefault(region.tensor, []).append((region.is_flat, region.offsets, region.sizes, share.start, share.lengths))
        if share.is_inline:
            small.append((region.tensor, start, share.lengths[0]))
            continue
        for length in share.lengths:
            blocks.append(TensorBlock(len(blocks), region.tensor, start, start + length))
            start += length
    runs, first, at = list[InlineRun](), 0, 0
    for kind, several in groupby(small, key=lambda one: specs[one[0]][1:3]):
        sizes = [size for _, _, size in several]
        runs.append(InlineRun(*kind, first, first := first + len(sizes), data=slice(at, at := at + sum(sizes))))
    if at > MAX_BODY_BYTES:
        raise UnsupportedValueError(
            f"the {len(small):,} tensors of up to {INLINE_TENSOR_BYTES:,} bytes have {human_bytes(at)} together, and what one rank saves "
            f"may have {human_bytes(MAX_BODY_BYTES)} of them: stack them into larger tensors",
            object_id="state",
        )
    ranges = SourceRanges(*np.array(small, np.int64).reshape(-1, 3).T)
    inlined = InlineTensors(ranges, np.cumsum(ranges.sizes), runs)
    frozen_cuts = {tensor: repr(several).encode() for tensor, several in cuts.items()}
    layout_lengths = cut_opaque(captured.layout.encoded) if stores_layout else ()
    return WritePlan(blocks, inlined, regions, frozen_cuts, layout_lengths)


def places_of(captured: CapturedState, author: PartAuthor, block_bytes: int) -> list[tuple[Region, int, BlockShare]]:
    """What this rank stores: for each share the region, its offset in the tensor's source, and how it is cut."""
    held = regions_of_rank(captured.layout, author.rank, author.layout_ranks, captured.explicit)
    bases, shares = source_offsets(captured, held), assign_blocks(captured.layout, held, author.rank, block_bytes)
    return [(held[share.region], bases[share.region] + share.start, share) for share in shares]


def source_offsets(captured: CapturedState, held: Sequence[Region]) -> list[int]:
    """The offset of each region that a rank holds in its tensor's source, which has one region after another."""
    bases = [0] * len(held)
    for number in range(1, len(held)):
        before = held[number - 1]
        if before.tensor == held[number].tensor:  # a tensor's regions follow each other
            bases[number] = bases[number - 1] + before.size_bytes(captured.layout.tensors[before.tensor])
    return bases

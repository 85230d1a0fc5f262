"""Where in a part the blocks of each region lie. Pure: follows from the part and its layout, and is checked against the part."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.block_assignment import MIN_RUN_BYTES, Region, assign_blocks, decode_regions, regions_of_rank
from tensorstore_ck.format.layout import MAX_ITEM_BYTES, Layout
from tensorstore_ck.format.pack import MAX_BLOCK_BYTES
from tensorstore_ck.format.part import Part


class RegionBytes(NamedTuple):
    """What a part has of one region: its bytes [start, stop)."""

    region: Region
    start: int
    stop: int
    first: int
    """The first extent row, or where the bytes begin in the part's inline ones."""
    lengths: list[int]
    """Bytes of each block."""
    is_inline: bool

    @property
    def rows(self) -> range:
        """The extent rows; none when it is inline."""
        return range(0) if self.is_inline else range(self.first, self.first + len(self.lengths))


class PartIndex:
    """The tensors' blocks of one part."""

    def __init__(self, layout: Layout, part: Part, layout_ranks: tuple[int, ...], block_bytes: int, name: str) -> None:
        """`layout_ranks`: the ranks with the same layout.

        Raises:
            CorruptObjectError: the part does not fit its layout.
        """
        self._held: dict[int, list[RegionBytes]] = {}
        explicit = decode_regions(layout, part.regions, name)
        known = set(layout_ranks)
        if not all(known.issuperset(mesh.ranks) for mesh in layout.meshes):
            raise CorruptObjectError(f"{name}: a mesh of its layout has ranks that are not in its group", object_id=name)
        all_regions = regions_of_rank(layout, part.rank, layout_ranks, explicit)
        most_bytes = np.minimum(part.extents["raw"], max(block_bytes, MAX_ITEM_BYTES)).sum(dtype=np.int64)  # no block of a tensor is larger
        if _least_bytes(layout, all_regions) > int(most_bytes) + len(part.inline):
            raise CorruptObjectError(f"{name}: it has fewer bytes than its layout says", object_id=name)
        row = first_row = int(part.blobs["blocks"].sum(dtype=np.int64))
        inline = 0
        lengths: list[int] = []
        for share in assign_blocks(layout, all_regions, part.rank, block_bytes):
            region = all_regions[share.region]
            at = inline if share.is_inline else row
            held = RegionBytes(region, share.start, share.start + sum(share.lengths), at, share.lengths, share.is_inline)
            self._held.setdefault(region.tensor, []).append(held)
            if share.is_inline:
                inline += share.lengths[0]
            else:
                row += len(share.lengths)
                lengths += share.lengths
        if row != part.block_count or inline != len(part.inline):
            raise CorruptObjectError(f"{name}: its blocks do not fit its layout", object_id=name)
        wrong = np.flatnonzero(part.extents["raw"][first_row:row] != np.array(lengths, np.int64))
        if len(wrong):
            tensor = self.tensor_at(first_row + int(wrong[0]))
            spec = layout.tensors[tensor if tensor is not None else 0]
            raise CorruptObjectError(f"{name}: the blocks of tensor {spec.name!r} do not fit its shape", object_id=spec.name)

    def of(self, tensor: int) -> list[RegionBytes]:
        """What the part has of a tensor, in order."""
        return self._held.get(tensor, [])

    def of_region(self, region: Region) -> RegionBytes | None:
        """What the part has of a region."""
        return next((held for held in self.of(region.tensor) if held.region[:4] == region[:4]), None)

    def tensor_at(self, row: int) -> int | None:
        """The tensor whose block is in an extent row."""
        return next((tensor for tensor, held in self._all() if row in held.rows), None)

    def _all(self) -> Iterator[tuple[int, RegionBytes]]:
        return ((tensor, held) for tensor, several in self._held.items() for held in several)


def _least_bytes(layout: Layout, held: list[Region]) -> int:
    """Of each set of replicas, what one of them has to store at least: known without a list of blocks, which a false layout makes huge."""
    totals: dict[tuple[int, ...], int] = {}
    for region in held:
        totals[region.replicas] = totals.get(region.replicas, 0) + region.size_bytes(layout.tensors[region.tensor])
    slack = max(MIN_RUN_BYTES, MAX_BLOCK_BYTES)
    return sum(total if len(ranks) == 1 else max(0, total // len(ranks) - slack) for ranks, total in totals.items())

"""Finds the blocks of each tensor region in a part. Pure: computed from the layout (`block_assignment`), and checked against the part."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.block_assignment import MIN_RUN_BYTES, Region, assign_blocks, bytes_of_replicas, decode_regions, regions_of_rank
from tensorstore_ck.format.layout import MAX_ITEM_BYTES, ExplicitRegions, Layout
from tensorstore_ck.format.pack import MAX_BLOCK_BYTES
from tensorstore_ck.format.part import Part


class RegionBytes(NamedTuple):
    """The bytes [start, stop) of one region that a part stores."""

    region: Region
    start: int
    stop: int
    first: int
    """The first extent row; for inline bytes, their offset in the part's inline bytes."""
    lengths: list[int]
    """Block lengths in bytes."""
    is_inline: bool

    @property
    def rows(self) -> range:
        """The extent rows; none for inline bytes."""
        return range(0) if self.is_inline else range(self.first, self.first + len(self.lengths))


class HeldRegions:
    """The regions in the part of a rank, as columns: objects for tens of thousands of tensors would wake the collector of garbage."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        layout_ranks: tuple[int, ...],
        block_bytes: int,
        *,
        name: str,
        explicit: Sequence[ExplicitRegions],
        rows: range,
        inline_bytes: int,
        max_bytes: int,
    ) -> None:
        """`rows`: the part's rows of tensor blocks; `max_bytes`: what these have together, at most. For the others see `PartIndex`.

        Raises:
            CorruptObjectError: the part does not fit the layout.
        """
        known = set(layout_ranks)
        if not all(known.issuperset(mesh.ranks) for mesh in layout.meshes):
            raise CorruptObjectError(f"{name}: a mesh of its layout has ranks outside its group", object_id=name)
        all_regions = regions_of_rank(layout, rank, layout_ranks, explicit)
        if _min_bytes(layout, all_regions) > max_bytes + inline_bytes:
            raise CorruptObjectError(f"{name}: it has fewer bytes than its layout needs", object_id=name)
        self.lengths: list[int] = []
        """The length of each block in bytes, by row."""
        self._first_row = rows.start
        self._first_of: dict[int, int] = {}
        """Tensor -> the position of its first region; its regions follow each other."""
        self._regions: list[Region] = []
        self._starts: list[int] = []
        self._firsts: list[int] = []
        """As `RegionBytes.first`."""
        self._counts: list[int] = []
        """The number of blocks; 0 for inline bytes."""
        self._inline_sizes: list[int] = []
        inline = 0
        for share in assign_blocks(layout, all_regions, rank, block_bytes):
            region = all_regions[share.region]
            self._first_of.setdefault(region.tensor, len(self._regions))
            self._regions.append(region)
            self._starts.append(share.start)
            self._firsts.append(inline if share.is_inline else rows.start + len(self.lengths))
            self._counts.append(0 if share.is_inline else len(share.lengths))
            self._inline_sizes.append(share.lengths[0] if share.is_inline else 0)
            if share.is_inline:
                inline += share.lengths[0]
            else:
                self.lengths += share.lengths
        if len(self.lengths) != len(rows) or inline != inline_bytes:
            raise CorruptObjectError(f"{name}: its blocks do not fit its layout", object_id=name)

    def of(self, tensor: int) -> list[RegionBytes]:
        """The bytes of a tensor, in order."""
        found = []
        for at in range(self._first_of.get(tensor, len(self._regions)), len(self._regions)):
            if self._regions[at].tensor != tensor:
                break
            found.append(self._held(at))
        return found

    def _held(self, at: int) -> RegionBytes:
        count, first, start = self._counts[at], self._firsts[at], self._starts[at]
        lengths = self.lengths[first - self._first_row : first - self._first_row + count] if count else [self._inline_sizes[at]]
        return RegionBytes(self._regions[at], start, start + sum(lengths), first, lengths=lengths, is_inline=not count)

    def tensor_at(self, row: int) -> int | None:
        """The number of the tensor whose block is in an extent row; None if there is none."""
        numbers = range(len(self._regions))
        return next((self._regions[at].tensor for at in numbers if 0 <= row - self._firsts[at] < self._counts[at]), None)


class PartIndex(HeldRegions):
    """The tensor blocks of one part, by region."""

    def __init__(
        self,
        layout: Layout,
        part: Part,
        layout_ranks: tuple[int, ...],
        block_bytes: int,
        name: str,
        *,
        explicit: Sequence[ExplicitRegions] | None = None,
    ) -> None:
        """`layout_ranks`: the ranks with this layout; `block_bytes`: the store's target size; `explicit`: the part's, if decoded already.

        Raises:
            CorruptObjectError: the part does not fit its layout.
        """
        first_row = int(part.blobs["blocks"].sum(dtype=np.int64))
        max_bytes = np.minimum(part.extents["raw"], max(block_bytes, MAX_ITEM_BYTES)).sum(dtype=np.int64)  # no tensor block is larger
        super().__init__(
            layout,
            part.rank,
            layout_ranks,
            block_bytes,
            name=name,
            explicit=decode_regions(layout, part.regions, name) if explicit is None else explicit,
            rows=range(first_row, part.block_count),
            inline_bytes=len(part.inline),
            max_bytes=int(max_bytes),
        )
        wrong = np.flatnonzero(part.extents["raw"][first_row : part.block_count] != np.array(self.lengths, np.int64))
        if len(wrong):
            tensor = self.tensor_at(first_row + int(wrong[0]))
            spec = layout.tensors[tensor if tensor is not None else 0]
            raise CorruptObjectError(f"{name}: the blocks of tensor {spec.name!r} do not fit its shape", object_id=spec.name)

    def of_region(self, region: Region) -> RegionBytes | None:
        """The part's bytes of a region; None if it stores none."""
        for at in range(self._first_of.get(region.tensor, len(self._regions)), len(self._regions)):
            if self._regions[at][:4] == region[:4]:
                return self._held(at)
            if self._regions[at].tensor != region.tensor:
                break
        return None


def _min_bytes(layout: Layout, held: list[Region]) -> int:
    """A lower bound of what a rank stores of its regions, computed without the list of blocks, which a forged layout makes huge."""
    totals, slack = bytes_of_replicas(layout, held), max(MIN_RUN_BYTES, MAX_BLOCK_BYTES)
    return sum(total if len(ranks) == 1 else max(0, total // len(ranks) - slack) for ranks, total in totals.items())

"""Which rank writes which blocks of the regions that ranks hold. Pure arithmetic; rules: FORMAT.md, "Many ranks".

A region is one contiguous piece of a tensor on one rank. Ranks that hold the same region are its replicas: each of its blocks is
written once, by one of them. Writers and readers compute the assignment from the layout, so it is neither exchanged nor stored.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from operator import add
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.chunker import cut_box, cut_interval
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.layout import INLINE_TENSOR_BYTES, ORIGINS, ExplicitRegions, Layout, Sharding, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds, Shard, boxes, holders_of, replicas

MIN_RUN_BYTES: Final = 64 << 20
"""Replicas divide their common bytes into runs of at least this size, so that each rank writes large objects."""


class Region(NamedTuple):
    """A box of a tensor, row-major, or an interval of the flattened tensor; never empty."""

    tensor: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    """In elements along each dim; offsets and sizes of an interval have one number each."""
    is_flat: bool
    replicas: tuple[int, ...]
    """The ranks that hold it, in order."""

    def size_bytes(self, spec: TensorSpec) -> int:
        """The region's size in bytes."""
        return prod(self.sizes) * spec.item_bytes

    def pieces(self, spec: TensorSpec, start: int, stop: int) -> Iterator[tuple[BoxBounds, int]]:
        """Boxes of the tensor that cover the region's elements [start, stop), each with its first element's number in the region."""
        if self.is_flat:
            covering = row_boxes(spec.shape, self.offsets[0] + start, self.offsets[0] + stop)
        else:
            covering = row_boxes(self.sizes, start, stop)
        for offsets, sizes in covering:
            if not self.is_flat:
                offsets = tuple(map(add, offsets, self.offsets))
            yield BoxBounds(offsets, sizes), start
            start += prod(sizes)

    def overlaps(self, spec: TensorSpec, box: BoxBounds, start: int, stop: int) -> bool:
        """Whether any of the region's elements [start, stop) lies in `box`."""
        return any(overlap(piece, box) is not None for piece, _ in self.pieces(spec, start, stop))

    def elements_before(self, spec: TensorSpec, box: BoxBounds) -> int | None:
        """How many of the region's elements precede the first one of `box`; None unless the elements of both are then in the same order."""
        if not self.is_flat and box.sizes and self.offsets[1:] == box.offsets[1:] and self.sizes[1:] == box.sizes[1:]:
            return (box.offsets[0] - self.offsets[0]) * prod(self.sizes[1:])
        own = self.offsets[0] if self.is_flat else _first_of_run(spec.shape, BoxBounds(self.offsets, self.sizes))
        other = None if own is None else _first_of_run(spec.shape, box)
        return None if own is None or other is None else other - own

    def common_elements(self, spec: TensorSpec, box: BoxBounds) -> int:
        """How many of the region's elements lie in `box`."""
        both = (overlap(piece, box) for piece, _ in self.pieces(spec, 0, prod(self.sizes)))
        return sum(prod(box.sizes) for box in both if box is not None)

    def block_lengths(self, spec: TensorSpec, target_bytes: int) -> list[int]:
        """The region's block lengths in bytes, in order. A region of up to half the target is one block, independent of its shape."""
        size_bytes = prod(self.sizes) * spec.item_bytes
        if size_bytes <= target_bytes // 2:
            return [size_bytes]
        if self.is_flat:
            lengths = cut_interval(self.offsets[0], self.offsets[0] + self.sizes[0], spec.item_bytes, target_bytes)
        else:
            lengths = cut_box(self.offsets, self.sizes, spec.item_bytes, target_bytes)
        return [int(length) for length in lengths]


class BlockShare(NamedTuple):
    """The consecutive blocks of one region that one part stores, or all of a small region inside the part."""

    region: int
    """The region's position in the list of the rank's regions."""
    start: int
    """Where the first block begins, in bytes of the region."""
    lengths: list[int]
    """Block lengths in bytes."""
    is_inline: bool


def _first_of_run(shape: tuple[int, ...], box: BoxBounds) -> int | None:
    """The number of a box's first element in the flattened tensor; None unless its elements follow each other there."""
    whole = len(shape)
    while whole and box.sizes[whole - 1] == shape[whole - 1]:
        whole -= 1
    if any(size != 1 for size in box.sizes[: max(whole - 1, 0)]):
        return None
    first = 0
    for extent, offset in zip(shape, box.offsets, strict=True):
        first = first * extent + offset
    return first


def ranks_with_layout(layout_of: bytes, rank: int, ranks: int) -> tuple[int, ...]:
    """The ranks that have the same layout as `rank`, in order."""
    if not layout_of:
        return tuple(range(ranks))
    numbers = np.frombuffer(layout_of, "<u2")
    return tuple(np.flatnonzero(numbers == numbers[rank]).tolist())


def first_rank_with_layout(layout_of: bytes, rank: int) -> int:
    """The first rank with the layout of `rank`."""
    numbers = np.frombuffer(layout_of, "<u2")
    return int(np.argmax(numbers == numbers[rank])) if layout_of else 0


def first_ranks(layout_of: bytes) -> list[int]:
    """The first rank with each layout."""
    return np.unique(np.frombuffer(layout_of, "<u2"), return_index=True)[1].tolist() if layout_of else [0]


def regions_of_rank(
    layout: Layout,
    rank: int,
    layout_ranks: tuple[int, ...],
    explicit: Sequence[ExplicitRegions] = (),
    *,
    tensors: Sequence[int] | None = None,
) -> list[Region]:
    """Every region that a rank holds, in the order of the layout; with `tensors` only of these, in order.

    `layout_ranks`: the ranks with this layout, in order: the replicas of whole tensors. `explicit`: the regions in that rank's part, of
    tensors whose regions do not follow from the layout. Raises `CorruptObjectError` if it lacks one.
    """
    regions: list[Region] = []
    explicit_of = {region.tensor: region for region in explicit}
    coordinates = [mesh.coordinate(rank) for mesh in layout.meshes]
    holders: dict[Sharding, tuple[int, ...]] = {}
    specs = layout.tensors[:]
    for number in range(len(specs)) if tensors is None else tensors:
        spec, spread = specs[number], layout.spreads[number] if layout.spreads else None
        if spread is None:
            if 0 not in spec.shape:
                regions.append(
                    Region(tensor=number, offsets=ORIGINS[len(spec.shape)], sizes=spec.shape, is_flat=False, replicas=layout_ranks)
                )
        elif isinstance(spread, str):
            if number not in explicit_of:
                raise CorruptObjectError(f"the part of rank {rank} does not list its regions of tensor {spec.name!r}", object_id=spec.name)
            regions += [Region(number, *box, spread == "flat", (rank,)) for box in explicit_of[number].boxes]
        else:
            mesh, coordinate = layout.meshes[spread.mesh], coordinates[spread.mesh]
            if coordinate is None:
                continue  # a tensor of other ranks
            for local in boxes(spec.shape, mesh.shape, spread.placements, coordinate):
                if spread not in holders:  # the same for every tensor with this spread
                    holders[spread] = replicas(mesh, spread.placements, spec.shape, rank)
                regions.append(Region(number, *local.box, False, holders[spread]))
    return regions


def regions_of_tensor(
    layout: Layout,
    tensor: int,
    layout_ranks: tuple[int, ...],
    explicit_boxes: Callable[[int, int], Sequence[BoxBounds]] = lambda rank, tensor: (),
    *,
    near: BoxBounds | None = None,
    order: Sequence[int] | None = None,
) -> Iterator[Region]:
    """Every region of a tensor, each once; with `near`, those that overlap that box, and perhaps a few others.

    `explicit_boxes` returns the regions listed in a rank's part, by rank and tensor number; it is called for the ranks in `order`.
    """
    spec, spread = layout.tensors[tensor], layout.spreads[tensor] if layout.spreads else None
    if spread is None:
        if 0 not in spec.shape:
            yield Region(tensor=tensor, offsets=ORIGINS[len(spec.shape)], sizes=spec.shape, is_flat=False, replicas=layout_ranks)
    elif isinstance(spread, str):
        for rank in layout_ranks if order is None else order:
            yield from (Region(tensor, *box, spread == "flat", (rank,)) for box in explicit_boxes(rank, tensor))
    else:
        mesh = layout.meshes[spread.mesh]
        for coordinate in product(*_positions(spec.shape, mesh.shape, spread.placements, near)):
            index = 0
            for extent, position in zip(mesh.shape, coordinate, strict=True):
                index = index * extent + position
            holders = replicas(mesh, spread.placements, spec.shape, mesh.ranks[index])
            for local in boxes(spec.shape, mesh.shape, spread.placements, coordinate):
                yield Region(tensor, *local.box, False, holders)


def _positions(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: Sequence[Shard | None], near: BoxBounds | None
) -> Iterator[range]:
    """Along each mesh dim, the positions of the ranks that overlap a box; of replicas only the first."""
    whole = set(range(len(shape)))
    for extent, shard in zip(mesh_shape, placements, strict=True):
        if shard is None:
            yield range(1)
        elif near is None or shard.dim not in whole:
            yield range(extent)
        else:  # the first mesh dim to split this tensor dim: computed, not searched, as there may be thousands of positions
            whole.remove(shard.dim)
            start, size = near.offsets[shard.dim], near.sizes[shard.dim]
            yield holders_of(shape[shard.dim], pieces=shard.split_factor, count=extent, start=start, stop=start + size)


def bytes_of_replicas(layout: Layout, held: Sequence[Region]) -> dict[tuple[int, ...], int]:
    """Set of replicas -> the bytes of all their regions together."""
    totals: dict[tuple[int, ...], int] = {}
    specs = layout.tensors[:]
    for region in held:
        totals[region.replicas] = totals.get(region.replicas, 0) + prod(region.sizes) * specs[region.tensor].item_bytes
    return totals


def assign_blocks(layout: Layout, held: Sequence[Region], rank: int, target_bytes: int) -> Iterator[BlockShare]:
    """Which blocks of each region the part of `rank` stores, in order.

    All regions of one set of n replicas, T bytes together, are divided into k = max(1, min(n, T // `MIN_RUN_BYTES`)) runs: a block
    that begins at byte c belongs to run c * k // T, and run j to the j-th replica (FORMAT.md, "Who writes what").

    `held`: the regions that the rank holds, or a part of them that has all regions of each set of replicas. `target_bytes`: of a block.
    """
    is_shared = any(map(len, [region.replicas[1:] for region in held]))
    totals = bytes_of_replicas(layout, held) if is_shared else {}
    begun = dict.fromkeys(totals, 0)
    specs = layout.tensors[:]
    for number, region in enumerate(held):
        spec = specs[region.tensor]
        size_bytes = prod(region.sizes) * spec.item_bytes
        is_inline = size_bytes <= INLINE_TENSOR_BYTES
        lengths = [size_bytes] if is_inline else region.block_lengths(spec, target_bytes)
        first, last, start = 0, len(lengths), 0
        if len(region.replicas) > 1:
            total, at = totals[region.replicas], begun[region.replicas]
            runs = max(1, min(len(region.replicas), total // MIN_RUN_BYTES))
            starts = np.cumsum([0, *lengths[:-1]])
            owners = (at + starts) * runs // total
            first, last = np.searchsorted(owners, [replica_number := region.replicas.index(rank), replica_number + 1]).tolist()
            start = int(starts[first]) if first < last else 0
            begun[region.replicas] += size_bytes
        if first < last:
            yield BlockShare(number, start, lengths[first:last], is_inline)


def writers_of(layout: Layout, held: Sequence[Region], tensor: int) -> set[int]:
    """The ranks to which some byte of a tensor's regions is assigned, whatever the target size of blocks: see `assign_blocks`.

    `held`: the regions that a rank holds.
    """
    totals, begun, found = bytes_of_replicas(layout, held), Counter[tuple[int, ...]](), set[int]()
    specs = layout.tensors[:]
    for region in held:
        size_bytes, total, at = region.size_bytes(specs[region.tensor]), totals[region.replicas], begun[region.replicas]
        if region.tensor == tensor:
            runs = max(1, min(len(region.replicas), total // MIN_RUN_BYTES))
            found.update(region.replicas[at * runs // total : (at + size_bytes - 1) * runs // total + 1])
        begun[region.replicas] += size_bytes
    return found


def encode_regions(explicit: Sequence[ExplicitRegions]) -> bytes:
    """The bytes of a part's ``regions`` (``<i8``): for each tensor its number, dims, number of boxes, and each box's offsets and sizes."""
    numbers: list[int] = []
    for tensor, boxes_of in explicit:
        numbers += [tensor, len(boxes_of[0].sizes) if boxes_of else 0, len(boxes_of)]
        for box in boxes_of:
            numbers += [*box.offsets, *box.sizes]
    return np.array(numbers, "<i8").tobytes()


def decode_regions(layout: Layout, data: bytes, name: str) -> list[ExplicitRegions]:
    """The regions that `encode_regions` encoded, checked against the part's layout.

    Raises:
        CorruptObjectError: `data` is malformed or does not fit the layout.
    """
    regions: list[ExplicitRegions] = []
    try:
        numbers = np.frombuffer(data, "<i8").tolist()
        at = 0
        while at < len(numbers):
            tensor, dims, count = numbers[at : at + 3]
            at += 3
            if not (regions[-1].tensor if regions else -1) < tensor < len(layout.spreads) or not isinstance(layout.spreads[tensor], str):
                raise ValueError("a tensor is out of order, or its regions follow from the layout")
            shape = layout.tensors[tensor].shape
            if layout.spreads[tensor] == "flat":
                shape = (prod(shape),)
            if dims != (len(shape) if count else 0) or not 0 <= count <= (len(numbers) if dims else 1):
                raise ValueError("a tensor has other dims, or too many regions")
            listed = []
            for _ in range(count):
                listed.append(BoxBounds(tuple(numbers[at : at + dims]), tuple(numbers[at + dims : at + 2 * dims])))
                at += 2 * dims
            if not all(box.lies_within(shape) and 0 not in box.sizes for box in listed):
                raise ValueError("a region lies outside of its tensor, or is empty")
            regions.append(ExplicitRegions(tensor, tuple(listed)))
    except (ValueError, IndexError) as exc:
        raise CorruptObjectError(f"{name} has malformed regions: {exc}", object_id=name) from exc
    return regions


def overlap(one: BoxBounds, other: BoxBounds) -> BoxBounds | None:
    """The intersection of two boxes; None when it is empty."""
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + b, c + d) for a, b, c, d in zip(*one, *other, strict=True))
    sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
    return BoxBounds(offsets, sizes) if all(size > 0 for size in sizes) else None


def row_boxes(sizes: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Covers elements [start, stop) of a row-major box by (offsets, sizes), in order."""
    if start >= stop:
        return
    if not sizes:
        yield (), ()
        return
    row = prod(sizes[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # inside one row
        for offsets, inner in row_boxes(sizes[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *inner)
        return
    if start < first * row:
        for offsets, inner in row_boxes(sizes[1:], start - (first - 1) * row, row):
            yield (first - 1, *offsets), (1, *inner)
    if first < last:
        yield (first, *(0,) * (len(sizes) - 1)), (last - first, *sizes[1:])
    if last * row < stop:
        for offsets, inner in row_boxes(sizes[1:], 0, stop - last * row):
            yield (last, *offsets), (1, *inner)

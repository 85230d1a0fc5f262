"""Computes which elements of a global tensor each rank holds, from meshes and placements. Rules: FORMAT.md, "Many ranks".

Pure and free of torch, but agrees element by element with torch's DTensor: placements apply to the mesh's dims from left to right, and
each splits the rest as ``torch.chunk`` does. A rank holds a list of *runs* per tensor dim, in ascending order; its local tensor is
their cartesian product, row-major. Every call costs O(mesh dims x runs), whatever the world size, except `Mesh.coordinate`, which
may search.
"""

import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from math import prod
from typing import Final, NamedTuple

_CHANCE: Final = random.SystemRandom()
_PRIME: Final = (1 << 61) - 1

Run = tuple[int, int]
"""(start, length) along one dim."""


class Shard(NamedTuple):
    """Split along a tensor dim."""

    dim: int
    split_factor: int = 1
    """Above 1: torch's ``_StridedShard``, which first cuts that many pieces and then splits each of them."""


Placement = Shard | None
"""None: replicated."""


class Mesh(NamedTuple):
    """A grid of ranks of the group."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]
    """Row-major, distinct."""

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """The position of `rank` along each dim; None if it is not in the mesh."""
        if rank < len(self.ranks) and self.ranks[rank] == rank:
            index = rank  # true of most meshes; searching thousands of ranks for each tensor takes minutes
        elif rank in self.ranks:
            index = self.ranks.index(rank)
        else:
            return None
        coordinate = []
        for extent in reversed(self.shape):
            index, position = divmod(index, extent)
            coordinate.append(position)
        return tuple(reversed(coordinate))


class BoxBounds(NamedTuple):
    """Offsets and sizes of a box of a global tensor. The public `tensorstore_ck.Box` also has the memory that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def lies_within(self, shape: Sequence[int]) -> bool:
        """Whether it is a box of a tensor of that shape."""
        return len(self.offsets) == len(self.sizes) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= extent for start, size, extent in zip(*self, shape, strict=True)
        )


def whole_box(shape: tuple[int, ...]) -> BoxBounds:
    """All of a tensor."""
    return BoxBounds((0,) * len(shape), shape)


def tiles(shape: tuple[int, ...], boxes: Iterable[BoxBounds]) -> bool:
    """Whether boxes within a tensor cover each element once. Takes linear time: files may list any boxes.

    The corners of a box, each with a sign, determine it, and those of boxes that tile a tensor add up to the tensor's. With a random number
    for each coordinate, the sum of a box's signed corners is a product over axes; other boxes have the same sum once in 2^50 times.
    """
    number_of = [defaultdict[int, int](partial(_CHANCE.randrange, _PRIME)) for _ in shape]

    def corners(box: BoxBounds) -> int:
        product = 1
        for numbers, start, size in zip(number_of, box.offsets, box.sizes, strict=True):
            product = product * (numbers[start] - numbers[start + size]) % _PRIME
        return product

    return (sum(map(corners, boxes)) - corners(whole_box(shape))) % _PRIME == 0


class LocalBox(NamedTuple):
    """A box of a global tensor, and its offsets in the local one."""

    box: BoxBounds
    local_offsets: tuple[int, ...]


def intervals(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]
) -> list[list[Run]]:
    """The runs of each tensor dim that the rank at `coordinate` holds, in local order. Adjacent runs are merged, empty ones left out."""
    runs: list[list[Run]] = [[(0, extent)] if extent else [] for extent in shape]
    for count, placement, index in zip(mesh_shape, placements, coordinate, strict=True):
        if placement is not None:
            before = runs[placement.dim]
            runs[placement.dim] = _take(before, _split(sum(length for _, length in before), placement.split_factor, count, index))
    return runs


def local_shape(runs: Sequence[Sequence[Run]]) -> tuple[int, ...]:
    """The shape of the local tensor that holds `runs`."""
    return tuple(sum(length for _, length in dim) for dim in runs)


def boxes(shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Placement], coordinate: Sequence[int]) -> list[LocalBox]:
    """The boxes that the rank at `coordinate` holds, in row-major order of their local offsets. No box is empty."""
    dims = [_with_local_starts(dim) for dim in intervals(shape, mesh_shape, placements, coordinate)]
    local_boxes = []
    for runs in product(*dims):
        box = BoxBounds(tuple(start for start, _, _ in runs), tuple(length for _, length, _ in runs))
        local_boxes.append(LocalBox(box, tuple(local for _, _, local in runs)))
    return local_boxes


def replicas(mesh: Mesh, placements: Sequence[Placement], shape: Sequence[int], rank: int) -> tuple[int, ...]:
    """All ranks that hold the same elements as `rank`, itself included, ascending; none if it holds nothing.

    Coordinates that differ along a sharding mesh dim hold disjoint pieces, so only the replicating dims count.
    """
    coordinate = mesh.coordinate(rank)
    if coordinate is None or 0 in local_shape(intervals(shape, mesh.shape, placements, coordinate)):
        return ()
    indexes = [0]
    for dim, (extent, placement) in enumerate(zip(mesh.shape, placements, strict=True)):
        step = prod(mesh.shape[dim + 1 :])
        positions = range(extent) if placement is None else (coordinate[dim],)
        indexes = [index + position * step for index in indexes for position in positions]
    return tuple(sorted(mesh.ranks[index] for index in indexes))


def holders_of(size: int, pieces: int, count: int, start: int, stop: int) -> range:
    """The shards that overlap the elements [start, stop) of `size`, and perhaps a few others; see `Shard` and `_split`."""
    if start >= stop:
        return range(0)
    length = -(-size // pieces)
    begin = start // length * length
    if stop > begin + length:
        return range(count)  # the elements span several pieces
    part = -(-(min(begin + length, size) - begin) // count)
    return range((start - begin) // part, (stop - 1 - begin) // part + 1)


def _split(size: int, pieces: int, count: int, index: int) -> list[tuple[int, int]]:
    """The ranges [start, stop) of `size` elements that shard `index` of `count` gets when each of `pieces` is split."""
    ranges = []
    length = -(-size // pieces)
    for start in range(0, size, max(length, 1)):
        stop = min(start + length, size)
        part = -(-(stop - start) // count)
        if start + index * part < stop:
            ranges.append((start + index * part, min(start + (index + 1) * part, stop)))
    return ranges


def _take(runs: list[Run], ranges: list[tuple[int, int]]) -> list[Run]:
    """The runs of the elements at the local positions `ranges` (ascending) of `runs`."""
    taken: list[Run] = []
    located = _with_local_starts(runs)
    number = 0
    for start, stop in ranges:
        while start < stop:
            run_start, length, local = located[number]
            if local + length <= start:
                number += 1
                continue
            first = run_start + start - local
            count = min(stop, local + length) - start
            if taken and sum(taken[-1]) == first:
                taken[-1] = (taken[-1][0], taken[-1][1] + count)
            else:
                taken.append((first, count))
            start += count
    return taken


def _with_local_starts(runs: Sequence[Run]) -> list[tuple[int, int, int]]:
    """(start, length, local start) of each run."""
    located = []
    local = 0
    for start, length in runs:
        located.append((start, length, local))
        local += length
    return located

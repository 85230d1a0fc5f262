"""Plans how tensors that share memory are stored. Pure: addresses in, a plan out.

Two leaves share an *area* if their allocations overlap, and memory if their own bytes do. Leaves of one area whose bytes are disjoint
stay tensors of their own, in one `SharedStorage`. Leaves that overlap become views of a leaf that covers them all, or else of an extra
tensor of plain bytes. So every byte is stored once, and a restore makes the tensors share memory again.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES: Final = 16
"""Every allocator's alignment. Offsets in a storage keep their address modulo it, so that views stay addressable."""
MAX_GAP_BYTES: Final = 4096
"""Gaps between two tensors of a storage are kept up to this size. Otherwise two rows of a large buffer would store the whole buffer."""

BOUNDS: Final = Struct("=QQ")
"""Where an allocation starts and stops."""

Numbers = npt.NDArray[np.intp]


class Extent(NamedTuple):
    """The addresses of one leaf."""

    device: object
    start: int
    """The lowest byte of its elements."""
    stop: int
    area_start: int
    area_stop: int
    """Its allocation."""
    address: int
    """Its first element."""
    size_bytes: int
    """Its size when stored on its own; less than ``stop - start`` if there are gaps."""
    is_whole: bool
    """Contiguous: its bytes are ``[start, stop)``."""
    repeats: bool
    """Two of its elements may have one address, as in an expanded tensor."""


Area = tuple[object, int, int, bool] | None
"""A leaf's device, start and stop of its allocation, and `Extent.repeats`; None for a leaf without bytes."""


@dataclass(slots=True, eq=False, repr=False)
class MemoryAreas:
    """The areas of all leaves, as columns."""

    bounds: bytearray = field(default_factory=bytearray)
    """Rows of `BOUNDS`; both are equal for leaves without bytes."""
    devices: dict[int, object] = field(default_factory=dict)
    """Leaf -> device, for leaves on one."""
    repeating: list[int] = field(default_factory=list)

    def append(self, area: Area) -> None:
        """Adds the next leaf's area."""
        device, start, stop, repeats = area or (None, 0, 0, False)
        leaf = len(self.bounds) // BOUNDS.size
        if device is not None:
            self.devices[leaf] = device
        if repeats:
            self.repeating.append(leaf)
        self.bounds += BOUNDS.pack(start, stop)


class CoveringArea(NamedTuple):
    """A tensor of plain bytes that covers overlapping leaves, none of which covers all others."""

    first: int
    """The first leaf in it, which gives it its name."""
    start: int
    stop: int


class AreaOffset(NamedTuple):
    """A base (a leaf's number; ``-1 - i`` for extra i) and an offset from its beginning."""

    base: int
    offset_bytes: int


class Storage(NamedTuple):
    """Bases in one allocation."""

    size_bytes: int
    offsets: Sequence[AreaOffset]


class AliasPlan(NamedTuple):
    """How leaves that share memory are stored."""

    views: dict[int, AreaOffset]
    """Leaf -> base and offset, for every leaf that is not stored on its own."""
    extras: list[CoveringArea]
    storages: list[Storage]


class _Cluster(NamedTuple):
    base: int
    start: int
    size_bytes: int


def find_alias_candidates(areas: MemoryAreas) -> list[int]:
    """The leaves whose allocation overlaps another's, or whose elements repeat: few or none in most states."""
    starts, stops = np.frombuffer(areas.bounds, np.uint64).reshape(-1, 2).T.copy()
    leaves_on: defaultdict[object, list[int]] = defaultdict(list)
    for leaf, device in areas.devices.items():
        leaves_on[device].append(leaf)
    has_bytes = starts < stops
    suspects = set(areas.repeating)
    for leaves in (np.delete(np.arange(len(starts)), list(areas.devices)), *map(np.array, leaves_on.values())):
        by_start = leaves[has_bytes[leaves]]
        by_start = by_start[np.argsort(starts[by_start], kind="stable")]
        reach = np.maximum.accumulate(stops[by_start])
        # A leaf that begins inside an earlier one overlaps it, and so do all leaves that begin between the two.
        before = np.flatnonzero(starts[by_start][1:] < reach[:-1])
        suspects.update(by_start[before].tolist(), by_start[before + 1].tolist())
    return sorted(suspects)


def plan_aliases(extents: dict[int, Extent]) -> AliasPlan:
    """Plans for the leaves that `find_alias_candidates` found."""
    plan = AliasPlan({}, [], [])
    by_device: defaultdict[object, list[tuple[int, int, int]]] = defaultdict(list)
    for leaf, extent in extents.items():
        by_device[extent.device].append((extent.area_start, extent.area_stop, leaf))
    areas = [area for intervals in by_device.values() for area in group_overlapping(intervals)]
    for area in sorted(areas, key=min):  # not by address, so that equal states have equal layouts
        _plan_area(area, extents, plan)
    return plan


def group_overlapping(intervals: list[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Groups leaves whose intervals (start, stop, leaf) overlap, each with the next."""
    run: list[int] = []
    reach = -1
    for start, stop, leaf in sorted(intervals):
        if run and start >= reach:
            yield run
            run, reach = [], -1
        run.append(leaf)
        reach = max(reach, stop)
    if run:
        yield run


def _plan_area(area: list[int], extents: dict[int, Extent], plan: AliasPlan) -> None:
    runs = group_overlapping([(extents[leaf].start, extents[leaf].stop, leaf) for leaf in area])
    clusters = [_plan_cluster(sorted(run), extents, plan) for run in runs]
    if len(clusters) == 1 and (clusters[0].start % ALIGNMENT_BYTES == 0 or len(area) == 1):
        return
    offsets = []
    position, stop = clusters[0].start % ALIGNMENT_BYTES, clusters[0].start
    for cluster in clusters:
        gap = cluster.start - stop
        position += gap if gap < MAX_GAP_BYTES else gap % MAX_GAP_BYTES
        offsets.append(AreaOffset(cluster.base, position))
        position += cluster.size_bytes
        stop = cluster.start + cluster.size_bytes
    plan.storages.append(Storage(position, offsets))


def _plan_cluster(members: list[int], extents: dict[int, Extent], plan: AliasPlan) -> _Cluster:
    """Chooses the base of leaves whose bytes overlap; all others become views of it."""
    first = extents[members[0]]
    if len(members) == 1 and not first.repeats:
        return _Cluster(members[0], first.start, first.size_bytes)
    start, stop = min(extents[leaf].start for leaf in members), max(extents[leaf].stop for leaf in members)
    for base in members:
        if extents[base].is_whole and extents[base].start == start and extents[base].stop == stop:
            break
    else:
        plan.extras.append(CoveringArea(members[0], start, stop))
        base = -len(plan.extras)
    plan.views.update({leaf: AreaOffset(base, extents[leaf].address - start) for leaf in members if leaf != base})
    return _Cluster(base, start, stop - start)

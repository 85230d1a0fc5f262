"""Which tensors of a state share memory, and how that is stored. Pure: addresses in, a plan out.

Two leaves share an *area* when their allocations overlap, and memory when their own bytes do. In one area, leaves whose bytes are
disjoint stay tensors of their own, placed in one `SharedStorage`. Leaves that overlap become views: of one that covers them all, or
else of an extra tensor of plain bytes. So every byte is stored once, and comes back shared.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

ALIGNMENT_BYTES: Final = 16
"""Every allocator's alignment. Positions in a storage keep their address modulo it, so that views stay addressable."""
MAX_GAP_BYTES: Final = 4096
"""Unused bytes between two tensors of a storage are kept up to here: two rows of a large buffer must not bring it along."""


Numbers = npt.NDArray[np.intp]
Addresses = npt.NDArray[np.uint64]


class Extent(NamedTuple):
    """Where one leaf lies."""

    device: object
    start: int
    """Its lowest byte."""
    stop: int
    area_start: int
    area_stop: int
    """Its allocation."""
    address: int
    """Its first element."""
    size_bytes: int
    """Bytes when stored on its own: less than ``stop - start`` where there are gaps."""
    is_whole: bool
    """Contiguous: its bytes are ``[start, stop)``."""
    repeats: bool
    """Two of its elements may lie at one place: it is expanded, for example."""


Area = tuple[object, int, int, bool] | None
"""What `find_alias_candidates` needs of a leaf: device, start and stop of its allocation, and `Extent.repeats`; None without bytes."""


class MemoryAreas:
    """Those of all leaves, as columns."""

    def __init__(self, areas: Iterable[Area] = ()) -> None:
        self.starts: list[int] = []
        self.stops: list[int] = []
        """As `starts` without bytes."""
        self.devices: dict[int, object] = {}
        """Leaf -> device, where there is one."""
        self.repeating: list[int] = []
        for area in areas:
            self.append(area)

    def append(self, area: Area) -> None:
        """Adds the next leaf's."""
        device, start, stop, repeats = area or (None, 0, 0, False)
        if device is not None:
            self.devices[len(self.starts)] = device
        if repeats:
            self.repeating.append(len(self.starts))
        self.starts.append(start)
        self.stops.append(stop)


class CoveringArea(NamedTuple):
    """A tensor of plain bytes that covers leaves of which none covers the others."""

    first: int
    """The first leaf in it, which it is named after."""
    start: int
    stop: int


class AreaOffset(NamedTuple):
    """A base (a leaf's number; ``-1 - i`` for extra i) and bytes from there."""

    base: int
    offset_bytes: int


class Storage(NamedTuple):
    """Bases that lie side by side in one allocation."""

    size_bytes: int
    places: Sequence[AreaOffset]


class AliasPlan(NamedTuple):
    """The plan."""

    views: dict[int, AreaOffset]
    """Leaf -> where it begins, for every leaf that is not stored on its own."""
    extras: list[CoveringArea]
    storages: list[Storage]


class _Cluster(NamedTuple):
    base: int
    start: int
    size_bytes: int


def find_alias_candidates(areas: MemoryAreas) -> list[int]:
    """The leaves whose allocation overlaps another's, or whose elements repeat: few or none, in most states."""
    starts, stops = np.array(areas.starts, np.uint64), np.array(areas.stops, np.uint64)
    leaves_on: defaultdict[object, list[int]] = defaultdict(list)
    for leaf, device in areas.devices.items():
        leaves_on[device].append(leaf)
    has_bytes = starts < stops
    suspects = set(areas.repeating)
    for leaves in (np.delete(np.arange(len(starts)), list(areas.devices)), *map(np.array, leaves_on.values())):
        suspects.update(_touching(leaves[has_bytes[leaves]], starts, stops))
    return sorted(suspects)


def _touching(leaves: Numbers, starts: Addresses, stops: Addresses) -> list[int]:
    """Those of `leaves` that overlap with another one's allocation, in one address space."""
    leaves = leaves[np.argsort(starts[leaves], kind="stable")]
    reach = np.maximum.accumulate(stops[leaves])
    # A leaf that begins within an earlier one touches it, and so does whatever begins between the two.
    before = np.flatnonzero(starts[leaves][1:] < reach[:-1])
    return [*leaves[before].tolist(), *leaves[before + 1].tolist()]


def plan_aliases(extents: dict[int, Extent]) -> AliasPlan:
    """Plans for the suspects."""
    plan = AliasPlan({}, [], [])
    by_device: defaultdict[object, list[tuple[int, int, int]]] = defaultdict(list)
    for leaf, extent in extents.items():
        by_device[extent.device].append((extent.area_start, extent.area_stop, leaf))
    for intervals in by_device.values():
        for area in group_overlapping(intervals):
            _plan_area(area, extents, plan)
    return plan


def group_overlapping(intervals: list[tuple[int, int, int]]) -> Iterator[list[int]]:
    """Groups leaves whose intervals (start, stop, leaf) overlap, one with the next."""
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
    places = []
    position, stop = clusters[0].start % ALIGNMENT_BYTES, clusters[0].start
    for cluster in clusters:
        gap = cluster.start - stop
        position += gap if gap < MAX_GAP_BYTES else gap % MAX_GAP_BYTES
        places.append(AreaOffset(cluster.base, position))
        position += cluster.size_bytes
        stop = cluster.start + cluster.size_bytes
    plan.storages.append(Storage(position, places))


def _plan_cluster(members: list[int], extents: dict[int, Extent], plan: AliasPlan) -> _Cluster:
    """Leaves whose bytes overlap: chooses the base that they are views of."""
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

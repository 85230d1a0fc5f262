"""Compares data that several ranks hold in different ways: reported regions, and tensors that ranks cut differently.

Equal regions are compared by a digest of everything that a set of ranks holds. Different cuts have no common blocks: there each rank adds
up a hash of each element's position in the whole tensor and its bits (the finalizer of SplitMix64: Steele et al., "Fast splittable
pseudorandom number generators", 2014), modulo 2^64. The sum over all ranks of a cut does not depend on the cut.
"""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import block_id, derived_hash
from tensorstore_ck.engine.interfaces import ByteSource, CapturedState
from tensorstore_ck.format.block_assignment import Region, regions_of_rank
from tensorstore_ck.format.layout import Layout, Sharding, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.session.group.planned_state import NOTHING, StoredRegions, reported_by, source_at, without_copies
from tensorstore_ck.session.group.region_claims import CompleteCut, MeshSpread
from tensorstore_ck.session.group.save_plan import SOLE, PlanMemory

PIECE_ELEMENTS: Final = 1 << 20
PIECE_BYTES: Final = 4 << 20
SHARES: Final = 16

_Words = npt.NDArray[np.uint64]


def is_compared(tensor: int, turn: int) -> bool:
    """Whether the turn-th save compares a tensor: all of them at the first save, later one of `SHARES` parts, in rotation."""
    return not turn or tensor % SHARES == turn % SHARES


class RegionSum(NamedTuple):
    """A rank's sum over a tensor that ranks hold in several ways."""

    tensor: int
    """Its number in the common layout."""
    cut: int
    replica: int
    """The number of this replica of the region."""
    total: int


def contradicting(sums: Sequence[RegionSum]) -> int | None:
    """A tensor whose cuts or replicas have different sums; None if there is none."""
    totals: dict[tuple[int, int, int], int] = {}
    for tensor, cut, replica, total in sums:
        key = tensor, cut, replica
        totals[key] = (totals.get(key, 0) + total) % (1 << 64)
    first: dict[int, int] = {}
    return next((tensor for (tensor, _, _), total in totals.items() if first.setdefault(tensor, total) != total), None)


class ReportedRegions(NamedTuple):
    """A region that several ranks report."""

    set_key: bytes
    """Names the set of these ranks."""
    tensor: int
    """Its number in the plan's layout."""
    digest: bytes


def reported_digests(captured: CapturedState, known: PlanMemory, rank: int, turn: int) -> list[ReportedRegions]:
    """Digests of the regions that other ranks report, too, in the same order on all. `captured`: this rank's state before planning."""
    held: list[tuple[tuple[int, BoxBounds], ReportedRegions]] = []
    for tensor, mine, boxes, entries in reported_by(captured, known, rank):
        start = 0
        for box, number in zip(boxes, entries, strict=True):
            size_bytes = prod(box.sizes) * captured.layout.tensors[mine].item_bytes
            if number != SOLE and is_compared(tensor, turn):
                key = bytes(derived_hash("told set of ranks", (number >> 1).to_bytes(4, "little"))[:8])
                held.append(((tensor, box), ReportedRegions(key, tensor, _digest(captured.sources[mine], start, start + size_bytes))))
            start += size_bytes
    return [reported for _, reported in sorted(held)]


def sums_of(captured: CapturedState, known: PlanMemory, rank: int, turn: int) -> list[RegionSum]:
    """The sums of this rank; `captured` is its state before planning."""
    layout = known.plan.layout
    if not known.plan.compared or layout is None:
        return []
    reported = {one.tensor: without_copies(captured, one) for one in reported_by(captured, known, rank)}
    cuts_of = {one.tensor: one.cuts for one in known.plan.compared if is_compared(one.tensor, turn)}
    sums: dict[int, RegionSum] = {}
    for place in known.places:
        tensor, spec = place.tensor, layout.tensors[place.tensor]
        for number, cut in enumerate(cuts_of.get(tensor, ())):
            if rank not in cut.ranks or tensor in sums:
                continue
            if isinstance(cut.spread, MeshSpread):
                held, source = _regions(spec, cut.spread, rank, cut), source_at(captured, layout, place)
            else:
                kept = reported.get(tensor, StoredRegions(NOTHING, ()))
                held, source = [Region(tensor, *box, cut.spread == "flat", (rank,)) for box in kept.boxes], kept.source
            start = total = 0
            for region in held:
                total += _sum(region, spec, source, start)
                start += region.size_bytes(spec)
            replica = held[0].replicas.index(rank) if held else 0
            sums[tensor] = RegionSum(tensor, number, replica, total % (1 << 64))
    return [*sums.values()]


def _regions(spec: TensorSpec, placed: MeshSpread, rank: int, cut: CompleteCut) -> list[Region]:
    layout = Layout(tensors=[spec], tree=0, storages=(), meshes=[placed.mesh], spreads=[Sharding(0, placed.placements)])
    return regions_of_rank(layout, rank, cut.ranks)


def _digest(source: ByteSource, start: int, stop: int) -> bytes:
    ids = [block_id(source.read(at, min(at + PIECE_BYTES, stop))) for at in range(start, stop, PIECE_BYTES)]
    return derived_hash("region of a replica", *ids)


def _sum(region: Region, spec: TensorSpec, source: ByteSource, start: int) -> int:
    """The digest of a region whose bytes begin at `start` of the source."""
    total = 0
    words = next(size for size in (8, 4, 2, 1) if spec.item_bytes % size == 0)
    steps = [prod(spec.shape[dim + 1 :]) for dim in range(len(spec.shape))]
    elements = prod(region.sizes)
    for first in range(0, elements, PIECE_ELEMENTS):
        last = min(first + PIECE_ELEMENTS, elements)
        data = source.read(start + first * spec.item_bytes, start + last * spec.item_bytes)
        bits = np.frombuffer(data, f"<u{words}").astype(np.uint64).reshape(last - first, -1)
        whole = np.concatenate([*_places(region, spec=spec, steps=steps, first=first, last=last)])
        places = (whole[:, None] * np.uint64(bits.shape[1]) + np.arange(bits.shape[1], dtype=np.uint64)).astype(np.uint64)
        total += int(_mixed(bits, places).sum(dtype=np.uint64))
    return total


def _places(region: Region, spec: TensorSpec, steps: Sequence[int], first: int, last: int) -> Iterator[_Words]:
    """The positions of elements [first, last) of a region in the flattened tensor."""
    for (offsets, sizes), _ in region.pieces(spec, first, last):
        places = np.zeros((), np.uint64)
        for offset, size, step in zip(offsets, sizes, steps, strict=True):
            places = places[..., None] + np.arange(offset, offset + size, dtype=np.uint64) * np.uint64(step)
        yield places.ravel()


def _mixed(bits: _Words, places: _Words) -> _Words:
    mixed = bits * np.uint64(0x9E3779B97F4A7C15) + (places + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    final: _Words = mixed ^ (mixed >> np.uint64(31))
    return final

"""Which rank stores which reported region of a tensor: boxes, or intervals of the flattened tensor. Pure arithmetic.

One rank stores a region that several hold. Different regions must not overlap, and together they must cover the tensor.

A *cut* is one way in which ranks of several kinds hold a tensor in full: by ranks that each have all of it, by shards on a mesh, or by
reported regions. Kinds that cut it in the same way are one cut with replicas, such as the columns of a mesh that each have the tensor on
their own mesh.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Literal, NamedTuple

import numpy as np

from tensorstore_ck.format.layout import ExplicitRegions, Layout, TensorSpec
from tensorstore_ck.format.sharding import BoxBounds, Mesh, Placement
from tensorstore_ck.session.group.rank_messages import named_ranks

Held = tuple[int, BoxBounds]
"""A rank, and a region of a tensor that it holds."""


class RegionClaim(NamedTuple):
    """A region that several ranks hold."""

    holders: tuple[int, ...]
    keeper: int
    """The rank that stores it."""


def uncovered(layout: Layout, reported: Mapping[int, Sequence[ExplicitRegions]]) -> str:
    """The tensor that the ranks with a layout do not hold exactly once, as text; empty if there is none.

    `reported`: rank -> its regions of tensors whose regions do not follow from the layout.
    """
    held: dict[int, list[Held]] = {}
    for rank, explicit in reported.items():
        for number, boxes in explicit:
            held.setdefault(number, []).extend((rank, box) for box in boxes)
    for tensor, spread in enumerate(layout.spreads):
        problem = gap(layout.tensors[tensor], held.get(tensor, ()), is_flat=spread == "flat") if isinstance(spread, str) else ""
        if problem:
            return problem
    return ""


def gap(spec: TensorSpec, held: Sequence[Held], *, is_flat: bool) -> str:
    """The elements of a tensor that are not held exactly once, as text; empty if there are none."""
    problem = _problem((prod(spec.shape),) if is_flat else spec.shape, held)
    return f"{problem} of tensor {spec.name!r}, of shape {list(spec.shape)}" if problem else ""


def once(held: Sequence[Held]) -> list[Held]:
    """The regions without repetitions: each one only for the first rank that holds it."""
    first: dict[BoxBounds, int] = {}
    for rank, box in held:
        first.setdefault(box, rank)
    return [(rank, box) for rank, box in held if first[box] == rank]


def claims(tensors: Iterable[tuple[TensorSpec, Sequence[Held]]]) -> list[dict[BoxBounds, RegionClaim]]:
    """The rank that stores each region that several hold, as one map for each tensor. Balances the bytes."""
    owners: list[dict[BoxBounds, RegionClaim]] = []
    several: list[tuple[int, int, BoxBounds, tuple[int, ...]]] = []
    load: dict[int, int] = {}
    for number, (spec, held) in enumerate(tensors):
        owners.append({})
        holders: dict[BoxBounds, list[int]] = {}
        for rank, box in sorted(set(held)):
            holders.setdefault(box, []).append(rank)
        for box, ranks in holders.items():
            size_bytes = prod(box.sizes) * spec.item_bytes
            if len(ranks) > 1:
                several.append((size_bytes, number, box, tuple(sorted(ranks))))
            else:
                load[ranks[0]] = load.get(ranks[0], 0) + size_bytes
    for size_bytes, number, box, together in sorted(several, key=lambda claim: (-claim[0], *claim[1:])):
        keeper = min(together, key=lambda rank: (load.get(rank, 0), rank))
        load[keeper] = load.get(keeper, 0) + size_bytes
        owners[number][box] = RegionClaim(together, keeper)
    return owners


def _problem(shape: tuple[int, ...], held: Sequence[Held]) -> str:
    elements = prod(shape)
    total = sum(prod(box.sizes) for _, box in held)
    if total < elements:
        return f"no rank holds {elements - total} of {elements} elements"
    # All pairs are compared.
    starts = np.array([box.offsets for _, box in held], np.int64).reshape(len(held), len(shape))
    ends = starts + np.array([box.sizes for _, box in held], np.int64).reshape(starts.shape)
    for at in range(len(held)):
        meets = ((starts[at + 1 :] < ends[at]) & (ends[at + 1 :] > starts[at])).all(axis=1)
        if meets.any():
            other = at + 1 + int(np.argmax(meets))
            return f"{named_ranks(sorted({held[at][0], held[other][0]}))} hold some elements twice"
    return "" if total == elements else f"{total} elements are held where there are {elements}"


class MeshSpread(NamedTuple):
    """How a tensor is spread over a mesh."""

    mesh: Mesh
    placements: tuple[Placement, ...]


Spread = MeshSpread | Literal["boxes", "flat"] | None
"""As `layout.Spread`, with the mesh itself. None: the whole tensor on each rank."""


class CompleteCut(NamedTuple):
    """One way in which the ranks have all of a tensor."""

    spread: MeshSpread | Literal["boxes", "flat"]
    ranks: tuple[int, ...]
    """The ranks that hold some of it, in order."""


class NotOneTensorError(Exception):
    """Kinds of ranks do not hold one tensor together. The message names the ranks, and why. Never leaves this package."""


def cuts_of(sides: Sequence[tuple[tuple[int, ...], Spread]]) -> list[CompleteCut]:
    """The cuts of a tensor that several kinds hold; the cut with the lowest rank is first. `sides`: the ranks of each kind, and its spread.

    Raises:
        NotOneTensorError: a rank of a mesh does not hold the tensor on it.
    """
    whole: set[int] = set()
    reported: dict[Literal["boxes", "flat"], set[int]] = {}
    meshes: dict[MeshSpread, set[int]] = {}
    for ranks, spread in sides:
        if spread is None:
            whole |= set(ranks)
        elif isinstance(spread, MeshSpread):
            meshes.setdefault(spread, set()).update(ranks)
        else:
            reported.setdefault(spread, set()).update(ranks)
    _check_complete(meshes, {rank: spread for ranks, spread in sides for rank in ranks})
    alike: dict[tuple[tuple[int, ...], tuple[Placement, ...]], list[MeshSpread]] = {}
    for placed in meshes:
        shards = [(extent, placement) for extent, placement in zip(placed.mesh.shape, placed.placements, strict=True) if placement]
        if not shards:
            whole |= set(placed.mesh.ranks)
        else:
            alike.setdefault((tuple(extent for extent, _ in shards), tuple(shard for _, shard in shards)), []).append(placed)
    cuts = [CompleteCut(spread, tuple(sorted(ranks))) for spread, ranks in reported.items()]
    for (_, shard), several in alike.items():
        merged = several[0] if len(several) == 1 else _side_by_side(several, shard)
        cuts.append(CompleteCut(merged, tuple(sorted(merged.mesh.ranks))))
    if whole:
        holders = tuple(sorted(whole))
        cuts.append(CompleteCut(MeshSpread(Mesh((len(holders),), holders), (None,)), holders))
    return sorted(cuts, key=lambda cut: cut.ranks)


def _check_complete(meshes: Mapping[MeshSpread, set[int]], spread_of: Mapping[int, Spread]) -> None:
    for placed, holders in meshes.items():
        missing = sorted(set(placed.mesh.ranks) - holders)
        if missing:
            other = "no such tensor" if missing[0] not in spread_of else in_words(spread_of[missing[0]])
            there = sorted(holders & set(placed.mesh.ranks))
            raise NotOneTensorError(f"{named_ranks(there)}: {in_words(placed)}; {named_ranks(missing)}: {other}")


def _side_by_side(several: Sequence[MeshSpread], shards: tuple[Placement, ...]) -> MeshSpread:
    """One mesh of several equal ones, whose first dim replicates."""
    rows = []
    for mesh, placements in several:
        replicated = [dim for dim, placement in enumerate(placements) if placement is None]
        sharded = [dim for dim, placement in enumerate(placements) if placement is not None]
        shape = tuple(mesh.shape[dim] for dim in sharded)
        rows.append(np.array(mesh.ranks).reshape(mesh.shape).transpose(*replicated, *sharded).reshape(-1, *shape))
    grid = np.concatenate(sorted(rows, key=lambda row: int(row.min())))
    return MeshSpread(Mesh(grid.shape, tuple(grid.ravel().tolist())), (None, *shards))


def in_words(spread: Spread) -> str:
    """For messages."""
    if spread is None:
        return "whole"
    if not isinstance(spread, MeshSpread):
        return "as pieces of the flattened tensor" if spread == "flat" else "as boxes"
    shards = ", ".join("replicated" if shard is None else f"split along dim {shard.dim}" for shard in spread.placements)
    return f"{shards} on the mesh of {named_ranks(sorted(spread.mesh.ranks))}"

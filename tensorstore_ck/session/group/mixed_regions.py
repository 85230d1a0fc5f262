"""How ranks of several kinds hold one tensor together. Pure arithmetic.

A *cut* is one way in which a tensor is held in full: by ranks that each have all of it, by shards on a mesh, or by reported regions. Kinds
that cut it in the same way are one cut with replicas, such as the columns of a mesh that each have the tensor on their own mesh.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from tensorstore_ck.format.sharding import Mesh, Placement
from tensorstore_ck.session.group.rank_messages import named_ranks


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
    """The cuts of a tensor that several kinds hold; the cut with the lowest rank is first.

    Args:
        sides: The ranks of each kind, and how they hold it.

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

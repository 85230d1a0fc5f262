"""How ranks save together: rank 0 makes a plan from the proposals of all, and all keep it for later saves.

    same     all ranks have one layout, which says what each holds
    apart    ranks of several kinds, each kind with its own layout: see `rank_kinds.can_stay_apart`
    united   ranks of several kinds under one layout, which contains what any of them has: see `merge_layouts.unite`

The plan is valid for all saves of ranks with the same layouts and regions. Knows no torch.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.layout import Layout, decode_layout
from tensorstore_ck.format.sealed import take, take_count
from tensorstore_ck.format.sharding import Mesh, Shard
from tensorstore_ck.format.tree import Leaf
from tensorstore_ck.session.group.merge_layouts import ComparedTensor, ReportedRegionsTensor, UnitedState, unite
from tensorstore_ck.session.group.rank_kinds import RankKind, ReportedBoxes, can_stay_apart, unzip_body, zip_body
from tensorstore_ck.session.group.region_claims import CompleteCut, MeshSpread, claims

MAX_PLANS: Final = 8
"""The number of plans that a rank keeps for a group."""
SOLE, KEEPS = 0, 1
"""The plan's entry for a region that no other rank holds. In other entries, bit 0: this rank stores the region for all that hold it."""


class SavePlan(NamedTuple):
    """The part of a plan that all ranks know."""

    form: Literal["same", "apart", "united"] = "same"
    layout: Layout | None = None
    """The common layout, if united."""
    holes: int = 0
    """The number of values of the common layout."""
    compared: Sequence[ComparedTensor] = ()
    sets: Sequence[bytes] = ()
    """For each rank, a u4 for each of its regions, in the order of the layout: `SOLE`, or twice the number of the set of ranks that hold
    the region, plus `KEEPS`. Empty if no reported region is held by several ranks."""

    def regions_of(self, rank: int) -> Sequence[int] | None:
        """The plan's entries for the regions that `rank` reports; None: no other rank holds any of them."""
        return np.frombuffer(self.sets[rank], "<u4").tolist() if self.sets else None

    def encode(self) -> bytes:
        """The bytes that are sent to the other ranks."""
        body = {
            "form": self.form,
            "layout": b"" if self.layout is None else self.layout.encoded,
            "holes": self.holes,
            "compared": [[tensor.tensor, [_pack_cut(cut) for cut in tensor.cuts]] for tensor in self.compared],
            "sets": list(self.sets),
        }
        return zip_body(body)


class PlannedTensor(NamedTuple):
    """The position of this rank's tensor in the common layout."""

    tensor: int
    """Its number in the common layout."""
    mine: Leaf
    """The leaf on this rank: a tensor, or a view into one."""
    is_view: bool
    """Whether it is a view on this rank, and a tensor of its own in the common layout."""


@dataclass(slots=True)
class PlanMemory:
    """A plan that a rank keeps, and its use."""

    plan: SavePlan
    turn: int = 0
    """The number of saves that were published with it, on rank 0."""
    places: Sequence[PlannedTensor] = ()
    """This rank's tensors in the common layout, if united."""
    united: UnitedState | None = None
    """The merged state of ranks of several kinds, on rank 0."""
    derived: dict[object, Any] = field(default_factory=dict)
    """From the common layout: see `CapturedState`."""


Memory = dict[bytes, PlanMemory]
"""The plans that a group has used, by a key of the layouts of all ranks."""


def remember(memory: Memory, key: bytes, known: PlanMemory) -> None:
    """Keeps a plan, and the newest other plans."""
    memory.pop(key, None)
    memory[key] = known
    for old in [*memory][:-MAX_PLANS]:
        del memory[old]


def decode_plan(data: bytes) -> SavePlan:
    """The plan that `SavePlan.encode` encoded.

    Raises:
        CorruptObjectError: it is not that.
    """
    try:
        body = unzip_body(data, "the plan of a put")
        encoded = take(body, "layout", bytes)
        compared = [ComparedTensor(int(tensor), tuple(map(_cut, cuts))) for tensor, cuts in take(body, "compared", list)]
        layout = decode_layout(encoded, "the layout of all ranks") if encoded else None
        form = take(body, "form", str)
        if form not in ("same", "apart", "united"):
            raise ValueError(f"unknown form {form!r}")
        return SavePlan(
            form=form,  # type: ignore[arg-type]
            layout=layout,
            holes=take_count(body, "holes"),
            compared=compared,
            sets=[bytes(entries) for entries in take(body, "sets", list)],
        )
    except (TypeError, ValueError, IndexError, zlib.error) as exc:
        raise CorruptObjectError(f"the plan of a save is malformed: {exc}", object_id="plan") from exc


def plan_of(kinds: Sequence[RankKind], reported: ReportedBoxes) -> PlanMemory:
    """Plans a save.

    Raises:
        LayoutMismatchError: the ranks cannot save one snapshot together.
    """
    if len(kinds) == 1:
        return PlanMemory(SavePlan("same", sets=_sets(_reported_of(kinds[0], reported), len(kinds[0].ranks))))
    united = unite(kinds, reported)
    if can_stay_apart(kinds, reported):
        return PlanMemory(SavePlan("apart"), united=united)
    sets = _sets(united.reported, sum(len(kind.ranks) for kind in kinds))
    plan = SavePlan(form="united", layout=united.layout, holes=len(united.holes), compared=united.compared, sets=sets)
    return PlanMemory(plan, united=united)


def _reported_of(kind: RankKind, reported: ReportedBoxes) -> list[ReportedRegionsTensor]:
    """The tensors whose regions the ranks report, if all have one layout.

    Raises:
        LayoutMismatchError: one of them is not held in full.
    """
    boxes = {rank: {regions.tensor: regions.boxes for regions in reported.get(rank, ())} for rank in kind.ranks}
    reported_tensors = []
    for tensor, spread in enumerate(kind.layout.spreads):
        if isinstance(spread, str):
            held = {rank: own.get(tensor, ()) for rank, own in boxes.items()}
            reported_tensors.append(ReportedRegionsTensor(kind.layout.tensors[tensor], spread, held))
            reported_tensors[-1].check()
    return reported_tensors


def _sets(reported: Sequence[ReportedRegionsTensor], ranks: int) -> list[bytes]:
    """See `SavePlan.sets`."""
    claimed_regions = claims((tensor.spec, tensor.held) for tensor in reported)
    if not any(claimed_regions):
        return []
    numbers: dict[tuple[int, ...], int] = {}
    entries: list[list[int]] = [[] for _ in range(ranks)]
    for tensor, claimed in zip(reported, claimed_regions, strict=True):
        for rank, boxes in tensor.boxes.items():
            for box in boxes:
                claim = claimed.get(box)
                if claim is None:
                    entries[rank].append(SOLE)
                else:
                    number = numbers.setdefault(claim.holders, len(numbers) + 1)
                    entries[rank].append(2 * number + (KEEPS if claim.keeper == rank else 0))
    return [np.array(tensor, "<u4").tobytes() for tensor in entries]


def _pack_cut(cut: CompleteCut) -> list[Any]:
    ranks = np.array(cut.ranks, "<u4").tobytes()
    if not isinstance(cut.spread, MeshSpread):
        return [cut.spread, ranks]
    mesh, placements = cut.spread
    return [[list(mesh.shape), np.array(mesh.ranks, "<u4").tobytes(), [shard and list(shard) for shard in placements]], ranks]


def _cut(item: Any) -> CompleteCut:
    spread, ranks = item
    if spread not in ("boxes", "flat"):
        shape, members, placements = spread
        mesh = Mesh(tuple(shape), tuple(np.frombuffer(members, "<u4").tolist()))
        spread = MeshSpread(mesh, tuple(shard and Shard(*shard) for shard in placements))
    return CompleteCut(spread, tuple(np.frombuffer(ranks, "<u4").tolist()))

"""One rank's side of planning a save, within the save's round: see `save_plan`.

Each rank proposes hashes of its layout and its regions. If all have the same layout and no regions, or know the plan from an earlier save,
only the values of a merged state are exchanged. Otherwise all ranks report their regions, and the first rank of each kind its layout and
values, to rank 0, which answers all with the plan.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tensorstore_ck.common.ids import DIGEST_BYTES, block_id, derived_hash
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.errors import MismatchError
from tensorstore_ck.format.block_assignment import decode_regions, encode_regions, ranks_with_layout
from tensorstore_ck.format.layout import Layout, layout_id
from tensorstore_ck.format.sealed import Body, pack_body, take, take_count, take_digest
from tensorstore_ck.session.group.duplicate_regions import RegionSum, ReportedRegions, reported_digests, sums_of
from tensorstore_ck.session.group.failure_reason import FailureReason, RankRefusedError
from tensorstore_ck.session.group.merge_layouts import LayoutMismatchError, difference, values_of
from tensorstore_ck.session.group.planned_state import places_of, planned
from tensorstore_ck.session.group.rank_kinds import RankKind, decode_kind, encode_kind
from tensorstore_ck.session.group.rank_messages import in_the_job
from tensorstore_ck.session.group.round import Round
from tensorstore_ck.session.group.save_plan import Memory, PlanMemory, SavePlan, decode_plan, plan_of, remember


class Planning:
    """The planning of one save."""

    def __init__(self, attempt: Round, memory: Memory, rank: int, ranks: int, in_job: Sequence[int] | None = None) -> None:
        """`memory`: the plans that this rank knows; `in_job`: see `named_ranks`."""
        self.turn = 0
        """The number of snapshots that were saved with this plan."""
        self.layout_of = b""
        """See `Part.layout_of`."""
        self._attempt = attempt
        self._memory = memory
        self._in_job = in_job
        self._rank = rank
        self._ranks = ranks
        self._known: Memory = {}
        self._used = PlanMemory(SavePlan())
        self._key = b""
        self._regions = b""
        """This rank's layout, encoded."""
        self._own: CapturedState

    def propose(self, shared: CapturedState) -> Body:
        """This rank's proposal: the layout and the kinds of its state."""
        self._known = dict(self._memory)  # a copy: concurrent saves may remove plans
        self._regions = encode_regions(shared.explicit)
        return {
            "layout": layout_id(shared.layout.encoded),
            "regions": _hash_of(self._regions),
            "values": derived_hash("values of a put", pack_body([list(shared.values), list(shared.blobs)])),
            "plans": b"".join(self._known),
        }

    def follow(self, go: Body, shared: CapturedState) -> CapturedState:
        """This rank's state in the form of the plan.

        Raises:
            RankRefusedError: on rank 0: the ranks cannot save one snapshot together.
        """
        self._own = shared
        self._key, is_known, reporters = take_digest(go, "key"), take(go, "is_known", bool), list(map(int, take(go, "reporters", list)))
        self.turn, self.layout_of = take_count(go, "turn"), take(go, "layout_of", bytes)
        known_blobs = take(go, "blobs", bytes)
        asked_ranks = range(self._ranks) if take(go, "ask_regions", bool) else ()
        regions = self._attempt.ask("regions", asked_ranks, lambda: self._regions)
        reported = self._attempt.ask("kinds", reporters, lambda: encode_kind(shared, with_layout=not is_known, known_blobs=known_blobs))
        differ = take(go, "differ", bool)
        values, blobs = self._lead(reported, regions, shared, is_known=is_known, differ=differ) if self._rank == 0 else ([], [])
        known = self._known.get(self._key, PlanMemory(SavePlan()))
        if not is_known:
            answer = self._attempt.answer("plan", known.plan.encode() if self._rank == 0 else None)
            if self._rank:
                known = PlanMemory(decode_plan(answer))
                remember(self._memory, self._key, known)
        if known.plan.layout is not None and not known.places:
            known.places = places_of(shared, known.plan)
        self._used = known
        if known.plan.form != "apart":
            self.layout_of = b""
        return planned(shared, known, self._rank, values, blobs)

    def reported_digests(self) -> list[ReportedRegions]:
        """See `duplicate_regions.reported_digests`."""
        return reported_digests(self._own, self._used, self._rank, self.turn)

    def sums(self) -> list[RegionSum]:
        """See `duplicate_regions.sums_of`."""
        return sums_of(self._own, self._used, self._rank, self.turn)

    # --- rank 0 -------------------------------------------------------------------------------------------------------

    def compare(self, proposals: Sequence[Body], shared: CapturedState) -> Body:
        """Decides which plan is used, and which ranks report what; `shared` is the state of rank 0."""
        numbers: dict[bytes, int] = {}
        layout_of = [numbers.setdefault(take_digest(proposal, "layout"), len(numbers)) for proposal in proposals]
        self.layout_of = np.array(layout_of, "<u2").tobytes() if len(numbers) > 1 else b""
        regions = [take_digest(proposal, "regions") for proposal in proposals]
        has_regions = {*regions} != {_hash_of(b"")}
        key = derived_hash("layouts of a put", *numbers, self.layout_of, *regions)
        known = self._known.get(key)
        is_known = known is not None and all(_has(take(proposal, "plans", bytes), key) for proposal in proposals)
        first: dict[int, int] = {}
        for rank, number in enumerate(layout_of):
            first.setdefault(number, rank)
        odd = next((rank for rank, number in enumerate(layout_of) if proposals[rank]["values"] != proposals[first[number]]["values"]), None)
        if odd is not None:
            reporters, is_known = [first[layout_of[odd]], odd], False
        elif len(numbers) == 1:
            reporters, is_known = [], is_known or not has_regions
        else:
            reporters = [*first.values()]
        return {
            "key": key,
            "turn": 0 if known is None else known.turn,
            "layout_of": self.layout_of,
            "is_known": is_known,
            "reporters": reporters,
            "ask_regions": not is_known and odd is None and has_regions,
            "differ": odd is not None,
            "blobs": b"".join(map(block_id, shared.blobs)) if reporters else b"",
        }

    def count(self) -> None:
        """Counts a saved snapshot."""
        self._used.turn += 1
        remember(self._memory, self._key, self._used)

    def _lead(
        self, reported: Mapping[int, bytes], regions: Mapping[int, bytes], shared: CapturedState, *, is_known: bool, differ: bool
    ) -> tuple[list[Any], list[bytes]]:
        """Makes a plan if none is known; returns the values of the merged state, if there is one, and the large ones."""
        known = self._known.get(self._key)
        kinds = self._kinds(reported, shared, is_known=is_known)
        try:
            if differ:
                raise difference(*kinds)
            if not is_known:
                regions = {**regions, 0: self._regions}
                layouts = {rank: kind.layout for kind in kinds for rank in kind.ranks}
                known = plan_of(
                    kinds, {rank: decode_regions(layout, regions.get(rank, b""), f"rank {rank}") for rank, layout in layouts.items()}
                )
                known.turn = self.turn
            merged_values = ([], []) if known is None or known.united is None else values_of(known.united, kinds)
            if known is not None and not is_known:
                self._known[self._key] = known
                remember(self._memory, self._key, known)
            return merged_values
        except LayoutMismatchError as exc:
            raise RankRefusedError(FailureReason(str(exc) + in_the_job(self._in_job), MismatchError.kind, exc.path)) from exc

    def _kinds(self, reported: Mapping[int, bytes], shared: CapturedState, *, is_known: bool) -> list[RankKind]:
        """The kinds of the ranks that reported; or the kind of all ranks, if none had to."""
        kinds = []
        for rank in reported or (0,):
            ranks = ranks_with_layout(self.layout_of, rank, self._ranks)
            ranks = ranks if len({*ranks} & {*reported}) < 2 else (rank,)
            if rank == 0:
                ids, blobs = [*map(block_id, shared.blobs)], dict(enumerate(shared.blobs))
                kinds.append(RankKind(ranks, shared.layout, shared.values, blobs, blob_ids=ids))
            else:
                kinds.append(decode_kind(reported[rank], ranks, Layout((), None) if is_known else None))
        return kinds


def _hash_of(regions: bytes) -> bytes:
    return derived_hash("regions of a put", regions)


def _has(keys: bytes, key: bytes) -> bool:
    return key in {keys[at : at + DIGEST_BYTES] for at in range(0, len(keys), DIGEST_BYTES)}

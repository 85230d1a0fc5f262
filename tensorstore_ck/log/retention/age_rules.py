"""The location and the encoding that policies ask for as snapshots age. Pure: no clock, no store."""

from collections.abc import Iterable
from typing import Final, NamedTuple, Self

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log import RefTable
from tensorstore_ck.log.retention.expire_operations import policies_of
from tensorstore_ck.log.retention.policy import AgeStage, Policy

NS: Final = 1_000_000_000
OWN_LOCATION: Final = AgeStage(0.0, "")
"""The store's own location."""
UNCHANGED: Final = AgeStage(0.0, "as it is")
"""The target without an age rule: a pack in the store stays there, and a moved pack stays where it is."""


class AgeTarget(NamedTuple):
    """The target of a snapshot, or of a pack."""

    stage: AgeStage
    """Where it should lie."""
    small: bool
    """Whether it should be encoded as small as possible."""

    def with_other(self, other: Self) -> "AgeTarget":
        """The target of a pack that both need: at the location of the younger one; small if one wants that."""
        return AgeTarget(min(self.stage, other.stage), self.small or other.small)


def age_targets(view: RefTable, now_ns: int) -> dict[Ulid, AgeTarget]:
    """The target of each snapshot that has a holder other than an undo window; empty if no policy has rules of ageing.

    A snapshot's age counts from when it was made, or from the last reset of its branch to it; with several branches the youngest age
    counts. For a snapshot on no branch, the rules of the branch that it was saved to apply. A pinned snapshot is in use: its target is the
    store's own location.

    Raises:
        InvalidOptionError: a newer build made one of the policies.
    """
    targets: dict[Ulid, AgeTarget] = {}

    def add(ulid: Ulid, policies: Iterable[Policy], since_ns: int) -> None:
        target = _age_target(policies, (now_ns - since_ns) / NS)
        targets[ulid] = target.with_other(targets[ulid]) if ulid in targets else target

    has_age_rules = False
    for branch in view.branches():
        own = policies_of(view, branch).values()
        has_age_rules |= any(policy.ages for policy in own)
        for move in view.moves(branch):
            info = view.snapshot(move.ulid)
            add(move.ulid, own, info.time_ns if info is not None and move.op == "put" else move.time_ns)
    pinned = {pin.ulid for pin in view.pins()}
    tagged = {row.ulid for _, row in view.tag_rows()}
    for ulid in (pinned | tagged) - targets.keys():
        info = view.snapshot(ulid)
        if info is not None:
            own = policies_of(view, info.ref).values()
            has_age_rules |= any(policy.ages for policy in own)
            add(ulid, own, info.time_ns)
    for ulid in pinned & targets.keys():
        targets[ulid] = AgeTarget(OWN_LOCATION, targets[ulid].small)
    return targets if has_age_rules or view.locations() else {}


def _age_target(policies: Iterable[Policy], age_seconds: float) -> AgeTarget:
    """The target by the policies of one branch: the last stage whose age is reached."""
    own = list(policies)
    passed = [stage for policy in own for stage in policy.move_after if age_seconds >= stage.after_seconds]
    young = OWN_LOCATION if any(policy.move_after for policy in own) else UNCHANGED
    return AgeTarget(max(passed, default=young), any(policy.recode_after and age_seconds >= policy.recode_after for policy in own))

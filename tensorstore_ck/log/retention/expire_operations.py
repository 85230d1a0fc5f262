"""Policies applied to a branch, at one entry of the log: which snapshots expire, and the operations for that."""

import shlex
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.log.retention.choose_kept import KeepCandidate, Unmatched, Verdict, choose, reasons_despite_policy, unmatched
from tensorstore_ck.log.retention.policy import Policy

Holders = Mapping[Ulid, Sequence[str]]
"""Snapshot -> the tags and pins that hold it."""

LONG: Final = 256
"""Policies are applied at each save to a branch of up to this many snapshots."""
LONG_EVERY: Final = 64
"""With more snapshots, policies are applied at one save in this many."""


def policies_of(view: RefTable, ref: str) -> dict[str, Policy]:
    """Glob -> policy, of all that apply to a branch.

    Raises:
        InvalidOptionError: a newer build made one of them, with rules that this one does not know.
    """
    policies = {}
    for glob, row in view.policies().items():
        if fnmatchcase(ref, glob):
            try:
                policies[glob] = Policy.of(**row.rules)
            except InvalidOptionError as exc:
                raise InvalidOptionError(f"the policy for {glob!r} cannot be used: {exc}", object_id=glob) from exc
    return policies


def verdicts(
    view: RefTable,
    ref: str,
    policies: Iterable[Policy],
    now_ns: int,
    *,
    holders: Holders,
    coming: SnapshotRow | None = None,
    count_bytes: Callable[[], Callable[[SnapshotRow], int]] | None = None,
) -> list[Verdict]:
    """The fate of each snapshot of a branch, oldest first. `coming`: the snapshot that the next entry will publish."""
    return choose(candidates(view, ref, holders, coming), list(policies), now_ns, count_bytes)


def candidates(view: RefTable, ref: str, holders: Holders, coming: SnapshotRow | None = None) -> list[KeepCandidate]:
    """The snapshots of a branch, oldest first, each once, at its last visit. `holders`: those of all branches (`tags_and_pins`)."""
    history: dict[Ulid, SnapshotRow] = {}
    visits = view.history(ref, newest_first=False) if view.branch(ref) is not None else ()
    for info in [*visits, *([coming] if coming is not None else [])]:
        history.pop(info.ulid, None)
        history[info.ulid] = info
    return [KeepCandidate(info, tuple(holders.get(info.ulid, ()))) for info in history.values()]


def expire(view: RefTable, ref: str, going: Collection[Ulid], holders: Holders) -> list[Op]:
    """The operation that expires the planned snapshots. Leaves out snapshots that are gone or got a holder since."""
    if not going or view.branch(ref) is None:
        return []
    left = [ulid for ulid, why in reasons_despite_policy(candidates(view, ref, holders)).items() if ulid in going and not why]
    return [Op.expire(ref, left)] if left else []


class UnmatchedRuleWarning(UserWarning):
    """A retention rule uses a metric, a trigger or an epoch that no snapshot of a branch has. It expires nothing there."""


def unmatched_rules(url: str, branches: Iterable[tuple[str, Mapping[str, Policy], Sequence[SnapshotRow]]]) -> list[str]:
    """A message for each rule that matches nothing in branches: the problem and the advice, for the store at `url`.

    Args:
        url: The store.
        branches: The name, the policies and the history of each.
    """
    found: defaultdict[tuple[str, str], list[tuple[str, Unmatched]]] = defaultdict(list)
    for ref, policies, history in branches:
        for glob, policy in policies.items():
            for rule in unmatched(history, policy) if history else ():
                found[glob, rule.rule].append((ref, rule))
    messages = []
    for (glob, name), of_refs in found.items():
        rule = Unmatched(name, tuple(sorted({there for _, rule in of_refs for there in rule.there})))
        others = f" and in {len(of_refs) - 1:,} more" if len(of_refs) > 1 else ""
        messages.append(
            f"the policy for {glob!r} matches nothing in {of_refs[0][0]!r}{others}, so nothing goes that it could keep: {rule}. Correct "
            f"the rule (`tsck policy set {shlex.quote(glob)} RULE=VALUE -s {shlex.quote(url)}`), or pass what it names to the saves"
        )
    return messages


def expire_at_save(view: RefTable, put: Op, now_ns: int, url: str) -> list[Op]:
    """The operations to expire snapshots in the entry that publishes one; limits of bytes are ignored, as they need more than the log.

    Warns of rules that match nothing. This reads all of the branch's history, so in a long one it happens at some saves only. A policy that
    this build does not know expires nothing.
    """
    ref = str(put.fields["ref"])
    try:
        policies = policies_of(view, ref)
    except InvalidOptionError:
        return []
    if not any(policy.keeps for policy in policies.values()) or not _is_due(view, ref):
        return []
    coming = SnapshotRow.of_op(put.fields, 0, now_ns)
    judged = verdicts(view, ref, policies.values(), now_ns, holders={}, coming=coming)
    for problem in unmatched_rules(url, [(ref, policies, [verdict.info for verdict in judged])]):
        warnings.warn(problem, UnmatchedRuleWarning, stacklevel=user_stacklevel())
    going = [verdict.info.ulid for verdict in judged if not verdict.stays]
    going = [ulid for ulid in going if not view.has_pin(ulid)]
    if any(view.holds(ulid) > 1 for ulid in going):  # else no tag has one of them
        tagged = {row.ulid for _, row in view.tag_rows()}
        going = [ulid for ulid in going if ulid not in tagged]
    return [Op.expire(ref, going)] if going else []


def _is_due(view: RefTable, ref: str) -> bool:
    branch = view.branch(ref)
    if branch is None or branch.length % LONG_EVERY == 0:
        return True
    return sum(1 for _ in view.moves(ref, limit=LONG + 1)) <= LONG


def tags_and_pins(view: RefTable) -> Holders:
    """What holds snapshots despite any policy. Reads all tags and pins: once for all branches."""
    holders: defaultdict[Ulid, list[str]] = defaultdict(list)
    for tag, row in view.tag_rows():
        holders[row.ulid].append(f"tag {tag}")
    for pin in view.pins():
        holders[pin.ulid].append(f"pinned by {pin.owner}")
    return holders

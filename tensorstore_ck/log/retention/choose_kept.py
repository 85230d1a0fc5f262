"""Which snapshots of a branch its policies keep, and why. Pure: no clock, no store."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.retention.policy import MILESTONES, TRIGGERS, Best, Policy

NS: Final = 1_000_000_000
NEWEST: Final = "newest"
FALLBACK: Final = "fallback"
MAX_NAMED: Final = 8


class KeepCandidate(NamedTuple):
    """A snapshot in a branch's history."""

    info: SnapshotRow
    held_by: tuple[str, ...] = ()
    """Tags and pins, by name: they hold it despite any policy."""


class Verdict(NamedTuple):
    """What happens to a snapshot."""

    info: SnapshotRow
    stays: bool
    why: tuple[str, ...]
    """All reasons to keep it; or the one to expire it."""


def choose(
    history: Sequence[KeepCandidate],
    policies: Sequence[Policy],
    now_ns: int,
    count_bytes: Callable[[], Callable[[SnapshotRow], int]] | None = None,
) -> list[Verdict]:
    """The fate of each snapshot of a branch.

    Args:
        history: Oldest first, each snapshot once; the last one is the branch's head.
        policies: The policies of this branch. A snapshot stays if any policy keeps it. Without a rule that keeps something, every snapshot
        stays.
        now_ns: The time.
        count_bytes: Called for each policy with a byte limit. Its result returns the bytes that a snapshot adds to those it was called with
        before: the snapshots that certainly stay, then those that rules keep, newest first. None: byte limits are ignored.
    """
    policies = [policy for policy in policies if policy.keeps]
    if not history or not policies:
        return [Verdict(candidate.info, stays=True, why=("no policy",)) for candidate in history]
    reasons = reasons_despite_policy(history)
    certain = {ulid for ulid, why in reasons.items() if why}
    gone: dict[Ulid, str] = {}
    for policy in policies:
        kept = _kept(history, policy, now_ns)
        newest_first = [candidate.info for candidate in reversed(history)]
        for ulid, limit in _beyond(newest_first, policy, kept.keys(), certain, now_ns=now_ns, count_bytes=count_bytes):
            if ulid not in certain:
                del kept[ulid]
                gone[ulid] = limit
        for ulid, why in kept.items():
            reasons[ulid] += [reason for reason in why if reason not in reasons[ulid]]
    return [
        Verdict(candidate.info, stays=bool(why), why=tuple(why) or (gone.get(candidate.info.ulid, "no rule keeps it"),))
        for candidate in history
        for why in [reasons[candidate.info.ulid]]
    ]


def reasons_despite_policy(history: Sequence[KeepCandidate]) -> dict[Ulid, list[str]]:
    """Why each snapshot of a branch stays despite any policy."""
    reasons = {candidate.info.ulid: list(candidate.held_by) for candidate in history}
    sound = [candidate.info for candidate in history[:-1] if not candidate.info.mark]
    for info, why in [(history[-1].info, NEWEST), *((info, FALLBACK) for info in sound[-1:])]:
        reasons[info.ulid].append(why)
    return reasons


def _kept(history: Sequence[KeepCandidate], policy: Policy, now_ns: int) -> dict[Ulid, list[str]]:
    """The snapshots that the rules of a policy keep, before its limits."""
    reasons: dict[Ulid, list[str]] = {}

    def keep(infos: Iterable[SnapshotRow], why: str) -> None:
        for info in infos:
            reasons.setdefault(info.ulid, []).append(why)

    everything = [candidate.info for candidate in history]
    sound = [info for info in everything if not info.mark]
    if policy.keep_last:
        keep(sound[-policy.keep_last :], "keep_last")
    for best in policy.keep_best:
        keep(_best(sound, best), f"keep_best {best.metric}")
    of_step = {info.step: info for info in sound if info.step is not None}  # the newest of each step
    if policy.keep_every:
        keep(_firsts((of_step[step] for step in sorted(of_step)), lambda info: (info.step or 0) // policy.keep_every), "keep_every")
    if policy.keep_epochs:
        of_epoch = {info.epoch: info for info in sound if info.epoch is not None}
        for info in _firsts((of_epoch[epoch] for epoch in sorted(of_epoch)), lambda info: (info.epoch or 0) // policy.keep_epochs):
            keep([info], f"keep_epochs (epoch {info.epoch:g})")
    if policy.keep_every_seconds:
        keep(_firsts(sound, lambda info: int(info.time_ns // (policy.keep_every_seconds * NS))), "keep_every_seconds")
    for rule, names in (("keep_milestones", MILESTONES if policy.keep_milestones else ()), ("keep_triggers", policy.keep_triggers)):
        for name in names:
            keep([info for info in sound if name in info.triggers], f"{rule} {name}")
    for missing in unmatched(everything, policy):
        keep(sound, f"{missing.rule}, which matches nothing")
    keep([of_step[step] for step in policy.keep_steps if step in of_step], "keep_steps")
    if policy.keep_first:
        keep(sound[:1], "keep_first")
    if policy.keep_younger:
        keep([info for info in everything if _age_seconds(info, now_ns) < policy.keep_younger], "keep_younger")
    return reasons


class Unmatched(NamedTuple):
    """A rule about a metric, epoch or trigger that no snapshot of a branch has: mistyped, or not reported yet. Keeps all it could keep."""

    rule: str
    there: tuple[str, ...]
    """What the snapshots have instead."""

    def __str__(self) -> str:
        names = ", ".join(map(repr, self.there[:MAX_NAMED])) + (", ..." if len(self.there) > MAX_NAMED else "")
        return f"{self.rule}: no snapshot has it; they have {names or 'none'}"


def unmatched(history: Sequence[SnapshotRow], policy: Policy) -> list[Unmatched]:
    """The rules of a policy that use a metric, an epoch or a user's trigger that no snapshot of the history has."""
    metrics = tuple(sorted({name for info in history for name in info.metrics}))
    triggers = tuple(sorted({name for info in history for name in info.triggers}))
    rules = [Unmatched(f"keep_best {best.metric}", metrics) for best in policy.keep_best if best.metric not in metrics]
    if policy.keep_epochs and all(info.epoch is None for info in history):
        rules.append(Unmatched("keep_epochs", ()))
    # a trigger of the package may still fire
    return rules + [Unmatched(f"keep_triggers {name}", triggers) for name in policy.keep_triggers if name not in (*triggers, *TRIGGERS)]


def _firsts(infos: Iterable[SnapshotRow], period: Callable[[SnapshotRow], Hashable]) -> Iterable[SnapshotRow]:
    firsts: dict[Hashable, SnapshotRow] = {}
    for info in infos:
        firsts.setdefault(period(info), info)
    return firsts.values()


def _best(sound: Sequence[SnapshotRow], best: Best) -> list[SnapshotRow]:
    """The snapshots with the best values; of equal ones the newer. Those without the metric, or with NaN, are left out."""
    sign = 1 if best.direction == "min" else -1
    values = [sign * info.metrics.get(best.metric, math.nan) for info in sound]
    ranked = sorted((value, -number) for number, value in enumerate(values) if not math.isnan(value))
    return [sound[-number] for _, number in ranked[: best.snapshots]]


def _beyond(
    newest_first: Sequence[SnapshotRow],
    policy: Policy,
    kept: Collection[Ulid],
    certain: Collection[Ulid],
    *,
    now_ns: int,
    count_bytes: Callable[[], Callable[[SnapshotRow], int]] | None,
) -> Iterator[tuple[Ulid, str]]:
    """The snapshots of `kept` beyond the limits of a policy, with the limit; some may be in `certain`."""
    left: list[SnapshotRow] = []
    for info in newest_first:
        if info.ulid in kept:
            if policy.expire_after and _age_seconds(info, now_ns) > policy.expire_after:
                yield info.ulid, "expire_after"
            elif info.ulid not in certain:
                left.append(info)
    if policy.max_bytes and count_bytes is not None:
        added_bytes = count_bytes()
        total = sum(added_bytes(info) for info in newest_first if info.ulid in certain)
        for info in left:
            total += added_bytes(info)
            if total > policy.max_bytes:
                yield info.ulid, "max_bytes"


def _age_seconds(info: SnapshotRow, now_ns: int) -> float:
    return (now_ns - info.time_ns) / NS

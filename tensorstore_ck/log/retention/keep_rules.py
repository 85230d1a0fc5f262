"""Which snapshots of a branch its policies keep, and why. Pure: no clock, no store."""

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.log.retention.policy import MILESTONES, TRIGGERS, Best, Policy

NS: Final = 1_000_000_000
NEWEST: Final = "newest"
FALLBACK: Final = "fallback"
MAX_NAMED: Final = 8


class KeepCandidate(NamedTuple):
    """A snapshot in a branch's history."""

    info: SnapshotInfo
    held_by: tuple[str, ...] = ()
    """Tags and pins, by name: they hold it despite any policy."""


class Verdict(NamedTuple):
    """What happens to a snapshot."""

    info: SnapshotInfo
    stays: bool
    why: tuple[str, ...]
    """All reasons to keep it; or the one to expire it."""


def choose(
    history: Sequence[KeepCandidate], policies: Sequence[Policy], now_ns: int, added_bytes: Callable[[SnapshotInfo], int] | None = None
) -> list[Verdict]:
    """What happens to each snapshot of a branch.

    Args:
        history: Oldest first, each snapshot once; the last one is the branch's head.
        policies: All that apply to this branch: what any of them keeps stays. Everything stays without a rule that keeps something.
        now_ns: The time.
        added_bytes: Called with the snapshots that certainly stay and then with those that rules keep, the newest first: how many bytes
            each uses that none before it does. None: limits of bytes are ignored.
    """
    policies = [policy for policy in policies if policy.keeps]
    if not history or not policies:
        return [Verdict(each.info, stays=True, why=("no policy",)) for each in history]
    reasons = reasons_despite_policy(history)
    certain = {ulid for ulid, why in reasons.items() if why}
    gone: dict[Ulid, str] = {}
    for policy in policies:
        kept = _kept(history, policy, now_ns)
        for ulid, limit in _beyond(
            [each.info for each in reversed(history)], policy, kept.keys(), certain, now_ns=now_ns, added_bytes=added_bytes
        ):
            if ulid not in certain:
                del kept[ulid]
                gone[ulid] = limit
        for ulid, why in kept.items():
            reasons[ulid] += [each for each in why if each not in reasons[ulid]]
    return [
        Verdict(each.info, stays=bool(why), why=tuple(why) or (gone.get(each.info.ulid, "no rule keeps it"),))
        for each in history
        for why in [reasons[each.info.ulid]]
    ]


def reasons_despite_policy(history: Sequence[KeepCandidate]) -> dict[Ulid, list[str]]:
    """Why each snapshot of a branch stays despite any policy."""
    reasons = {each.info.ulid: list(each.held_by) for each in history}
    sound = [each.info for each in history[:-1] if not each.info.mark]
    for info, why in [(history[-1].info, NEWEST), *((info, FALLBACK) for info in sound[-1:])]:
        reasons[info.ulid].append(why)
    return reasons


def _kept(history: Sequence[KeepCandidate], policy: Policy, now_ns: int) -> dict[Ulid, list[str]]:
    """What the rules of a policy keep, before its limits."""
    found: dict[Ulid, list[str]] = {}

    def keep(infos: Iterable[SnapshotInfo], why: str) -> None:
        for info in infos:
            found.setdefault(info.ulid, []).append(why)

    everything = [each.info for each in history]
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
        keep(_firsts((of_epoch[epoch] for epoch in sorted(of_epoch)), lambda info: (info.epoch or 0) // policy.keep_epochs), "keep_epochs")
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
    return found


class Unmatched(NamedTuple):
    """A rule that goes by what no snapshot of a branch has: mistyped, or not reported yet. It keeps everything that it could keep."""

    rule: str
    there: tuple[str, ...]
    """What the snapshots have instead."""

    def __str__(self) -> str:
        found = ", ".join(map(repr, self.there[:MAX_NAMED])) + (", ..." if len(self.there) > MAX_NAMED else "")
        return f"{self.rule}: no snapshot has it; they have {found or 'none'}"


def unmatched(history: Sequence[SnapshotInfo], policy: Policy) -> list[Unmatched]:
    """The rules of a policy that go by a metric, an epoch or a trigger of the user's own that no snapshot of the history has."""
    metrics = tuple(sorted({name for info in history for name in info.metrics}))
    triggers = tuple(sorted({name for info in history for name in info.triggers}))
    found = [Unmatched(f"keep_best {best.metric}", metrics) for best in policy.keep_best if best.metric not in metrics]
    if policy.keep_epochs and all(info.epoch is None for info in history):
        found.append(Unmatched("keep_epochs", ()))
    # a trigger of the package may still fire
    return found + [Unmatched(f"keep_triggers {name}", triggers) for name in policy.keep_triggers if name not in (*triggers, *TRIGGERS)]


def _firsts(infos: Iterable[SnapshotInfo], period: Callable[[SnapshotInfo], Hashable]) -> Iterable[SnapshotInfo]:
    """The first snapshot of each period."""
    found: dict[Hashable, SnapshotInfo] = {}
    for info in infos:
        found.setdefault(period(info), info)
    return found.values()


def _best(sound: Sequence[SnapshotInfo], best: Best) -> list[SnapshotInfo]:
    """The snapshots with the best values; of equal ones the newer. Those without the metric, or with NaN, are left out."""
    sign = 1 if best.direction == "min" else -1
    values = [sign * info.metrics.get(best.metric, math.nan) for info in sound]
    ranked = sorted((value, -number) for number, value in enumerate(values) if not math.isnan(value))
    return [sound[-number] for _, number in ranked[: best.snapshots]]


def _beyond(
    newest_first: Sequence[SnapshotInfo],
    policy: Policy,
    kept: Collection[Ulid],
    certain: Collection[Ulid],
    *,
    now_ns: int,
    added_bytes: Callable[[SnapshotInfo], int] | None,
) -> Iterator[tuple[Ulid, str]]:
    """The snapshots of `kept` beyond the limits of a policy, with the limit; some may be in `certain`."""
    left: list[SnapshotInfo] = []
    for info in newest_first:
        if info.ulid in kept:
            if policy.expire_after and _age_seconds(info, now_ns) > policy.expire_after:
                yield info.ulid, "expire_after"
            elif info.ulid not in certain:
                left.append(info)
    if policy.max_bytes and added_bytes is not None:
        total = sum(added_bytes(info) for info in newest_first if info.ulid in certain)
        for info in left:
            total += added_bytes(info)
            if total > policy.max_bytes:
                yield info.ulid, "max_bytes"


def _age_seconds(info: SnapshotInfo, now_ns: int) -> float:
    return (now_ns - info.time_ns) / NS

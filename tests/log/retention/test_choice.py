"""What policies keep, against a naive reading of the rules, over random histories."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.retention import Best, KeepCandidate, Policy, Verdict, choose
from tests.effort import effort

NS = 1_000_000_000
NOW = 2_000_000_000
"""In seconds."""


def snapshot(number: int, **fields: Any) -> SnapshotRow:
    root = Digest(number.to_bytes(32, "big"))
    info = SnapshotRow(Ulid(number.to_bytes(16, "big")), root, root, None, "run", None, number, NOW * NS, {}, 100, 10)
    return info._replace(**fields)


@st.composite
def histories(draw: st.DrawFn) -> list[KeepCandidate]:
    """Steps that go back at times, clocks that jump, metrics that are missing or no numbers, marks, pins and tags."""
    history = []
    for number in range(draw(st.integers(1, 10))):
        loss = draw(st.sampled_from([None, 0.1, 0.5, 0.5, 2.0, math.nan, math.inf]))
        info = snapshot(
            number,
            step=draw(st.none() | st.integers(-5, 30)),
            time_ns=(NOW - draw(st.integers(-100, 1000))) * NS,
            metrics={"acc": 0.5} if loss is None else {"loss": loss},
            triggers=draw(st.sampled_from([[], [], ["every_steps"], ["at_steps", "every_steps"], ["mine"]])),
            epoch=draw(st.sampled_from([None, 0.5, 2.0, 3.0, 5.5])),
            mark=draw(st.sampled_from(["", "", "", "bad", "damaged"])),
        )
        history.append(KeepCandidate(info, draw(st.sampled_from([(), (), (), (), ("tag v1",), ("pinned by ada",)]))))
    return history


@st.composite
def policies(draw: st.DrawFn, *, limits: bool = True) -> Policy:
    best = st.builds(Best, st.integers(1, 3), st.sampled_from(["loss"]), st.sampled_from(["min", "max"]))
    policy = Policy(
        keep_last=draw(st.integers(0, 3)),
        keep_best=draw(st.lists(best, max_size=1).map(tuple)),
        keep_every=draw(st.sampled_from([0, 1, 7, 10])),
        keep_every_seconds=draw(st.sampled_from([0.0, 0.5, 100.0])),
        keep_steps=draw(st.sampled_from([(), (0, 7), (30,)])),
        keep_first=draw(st.booleans()),
        keep_epochs=draw(st.sampled_from([0, 0, 1, 3])),
        keep_triggers=draw(st.sampled_from([(), (), ("every_steps",), ("mine",)])),
        keep_milestones=draw(st.booleans()),
        keep_younger=draw(st.sampled_from([0.0, 50.0, 400.0])),
    )
    assume(policy.keeps)  # as `Policy.of` has it
    if limits:
        policy = replace(policy, expire_after=draw(st.sampled_from([0.0, 500.0])), max_bytes=draw(st.sampled_from([0, 25, 60])))
    return policy


def kept_naively(history: Sequence[KeepCandidate], policy: Policy) -> set[int]:
    """Which positions in a history the rules keep, rule by rule and position by position, without limits."""
    infos = [each.info for each in history]
    sound = [at for at, info in enumerate(infos) if not info.mark]
    newest_of_step = {at for at in sound if infos[at].step is not None and all(infos[b].step != infos[at].step for b in sound if b > at)}
    newest_of_epoch = {
        at for at in sound if infos[at].epoch is not None and all(infos[b].epoch != infos[at].epoch for b in sound if b > at)
    }
    kept: set[int] = set()
    for at, info in enumerate(infos):
        if policy.keep_younger and (NOW * NS - info.time_ns) / NS < policy.keep_younger:
            kept.add(at)
        if info.mark:
            continue
        if sum(b > at for b in sound) < policy.keep_last:
            kept.add(at)
        known = {name for each in infos for name in each.triggers} | {"every_steps"}
        lacks = [best.metric not in {name for each in infos for name in each.metrics} for best in policy.keep_best]
        lacks += [bool(policy.keep_epochs) and all(each.epoch is None for each in infos), not known.issuperset(policy.keep_triggers)]
        if any(lacks) or set(policy.keep_triggers) & set(info.triggers) or (policy.keep_milestones and "at_steps" in info.triggers):
            kept.add(at)
        if policy.keep_epochs and at in newest_of_epoch:
            n, epoch = policy.keep_epochs, info.epoch
            assert epoch is not None
            if not any((e := infos[b].epoch) is not None and e // n == epoch // n and e < epoch for b in newest_of_epoch):
                kept.add(at)
        for best in policy.keep_best:
            value = info.metrics.get(best.metric, math.nan)
            if not math.isnan(value):
                others = [(infos[b].metrics[best.metric], b) for b in sound if not math.isnan(infos[b].metrics.get(best.metric, math.nan))]
                better = [b for v, b in others if (v < value if best.direction == "min" else v > value) or (v == value and b > at)]
                if len(better) < best.snapshots:
                    kept.add(at)
        if at in newest_of_step and policy.keep_every:
            n, step = policy.keep_every, info.step
            assert step is not None
            if not any((s := infos[b].step) is not None and s // n == step // n and s < step for b in newest_of_step):
                kept.add(at)
        if policy.keep_every_seconds:
            period = info.time_ns // int(policy.keep_every_seconds * NS)
            if not any(b < at and infos[b].time_ns // int(policy.keep_every_seconds * NS) == period for b in sound):
                kept.add(at)
        if at in newest_of_step and info.step in policy.keep_steps:
            kept.add(at)
        if policy.keep_first and at == sound[0]:
            kept.add(at)
    return kept


def certain(history: Sequence[KeepCandidate]) -> set[int]:
    found = {at for at, each in enumerate(history) if each.held_by} | {len(history) - 1}
    sound = [at for at, each in enumerate(history[:-1]) if not each.info.mark]
    return found | set(sound[-1:])


def staying(verdicts: Sequence[Verdict]) -> set[int]:
    return {at for at, verdict in enumerate(verdicts) if verdict.stays}


@settings(max_examples=effort(80, 1000))
@given(histories(), st.lists(policies(limits=False), min_size=1, max_size=3))
def test_rules_keep_what_a_naive_reading_keeps(history: list[KeepCandidate], several: list[Policy]) -> None:
    expected = certain(history).union(*(kept_naively(history, policy) for policy in several))
    assert staying(choose(history, several, NOW * NS)) == expected


@settings(max_examples=effort(80, 1000))
@given(histories(), policies())
def test_limits_take_the_oldest_and_never_what_is_certain(history: list[KeepCandidate], policy: Policy) -> None:
    found = choose(history, [policy], NOW * NS, lambda: lambda info: info.new_bytes)
    assert certain(history) <= staying(found)
    within = kept_naively(history, policy) - certain(history)
    if policy.expire_after:
        within -= {at for at in within if NOW - history[at].info.time_ns / NS > policy.expire_after}
    room = (policy.max_bytes - 10 * len(certain(history))) // 10 if policy.max_bytes else len(history)
    assert staying(found) == certain(history) | set(sorted(within, reverse=True)[: max(0, room)])
    assert all(verdict.why for verdict in found)


@settings(max_examples=effort(40, 1000))
@given(histories(), policies(limits=False), policies(limits=False), st.sampled_from([0.0, 500.0]))
def test_a_rule_more_never_frees_more(history: list[KeepCandidate], one: Policy, other: Policy, expire_after: float) -> None:
    one = replace(one, expire_after=expire_after)
    for name in Policy.__dataclass_fields__:
        if name.startswith("keep_") and not getattr(one, name):
            more = replace(one, **{name: getattr(other, name)})
            assert staying(choose(history, [one], NOW * NS)) <= staying(choose(history, [more], NOW * NS))
    assert staying(choose(history, [one], NOW * NS)) <= staying(choose(history, [one, other], NOW * NS))


@settings(max_examples=effort(40, 1000))
@given(histories(), policies())
def test_what_goes_stays_gone(history: list[KeepCandidate], policy: Policy) -> None:
    """A second look at what is left lets no more go; but for a fallback that bytes are counted of."""
    policy = replace(policy, max_bytes=0)
    left = [history[at] for at in sorted(staying(choose(history, [policy], NOW * NS)))]
    assert len(staying(choose(left, [policy], NOW * NS))) == len(left)


def test_without_a_policy_all_stays() -> None:
    assert [verdict.stays for verdict in choose([KeepCandidate(snapshot(1)), KeepCandidate(snapshot(2))], [], NOW * NS)] == [True, True]
    assert choose([], [Policy(keep_last=1)], NOW * NS) == []


def test_all_reasons_are_given() -> None:
    history = [KeepCandidate(snapshot(number, step=10 * number, metrics={"loss": number})) for number in range(4)]
    found = choose(history, [Policy.of(keep_last=1, keep_every=20, keep_best=(1, "loss", "min"), keep_steps=[20])], NOW * NS)
    assert [verdict.why for verdict in found] == [
        ("keep_best loss", "keep_every"),
        ("no rule keeps it",),
        ("fallback", "keep_every", "keep_steps"),
        ("newest", "keep_last"),
    ]


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"expire_after": "30d"},
        {"max_bytes": "1TB"},
        {"keep_lsat": 5},
        {"keep_last": 0},
        {"keep_last": True},
        {"keep_last": 2.5},
        {"keep_last": "5"},
        {"keep_best": (0, "loss", "min")},
        {"keep_best": (3, "loss", "least")},
        {"keep_best": (3, "loss")},
        {"keep_best": [(3, "loss", "min"), (2, "loss", "max")]},
        {"keep_every": -1000},
        {"keep_every_seconds": "soon"},
        {"keep_every_seconds": 0},
        {"keep_every_seconds": 1e-300},
        {"expire_after": 1e-10, "keep_last": 1},
        {"recode_after": math.inf},
        {"move_after": (1e12, "s3://bucket/cold")},
        {"keep_steps": [1 << 63]},
        {"keep_last": 1 << 60},
        {"keep_steps": []},
        {"keep_steps": [1.5]},
        {"keep_first": "yes"},
        {"keep_younger": math.nan},
        {"keep_younger": "60d", "expire_after": "30d"},
        {"keep_last": 1, "max_bytes": "much"},
        {"keep_last": 1, "max_bytes": 0},
    ],
)
def test_rules_that_make_no_sense_are_refused(rules: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        Policy.of(**rules)


@settings(max_examples=effort(40, 1000))
@given(policies())
def test_the_log_has_all_of_it(policy: Policy) -> None:
    try:
        made = Policy.of(**policy.encode())
    except InvalidOptionError:
        return
    assert made == policy
    assert Policy.of(**made.encode()) == made

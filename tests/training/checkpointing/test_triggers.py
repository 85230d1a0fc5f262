"""Triggers on random runs, and conditions on metrics."""

import math
import signal
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tensorstore_ck as tsck
from tensorstore_ck.common.metric_condition import condition
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.training.checkpointing import TriggerContext
from tensorstore_ck.training.checkpointing.triggers import DecidedTrigger


def steps_of(when: tsck.Trigger, steps: list[int], **moment: Any) -> list[int]:
    """At which steps of a run it fires."""
    fired: list[int] = []
    for number, step in enumerate(steps):
        now = TriggerContext(step, is_first=number == 0, previous_step=steps[number - 1] if number else None, **moment)
        if when.fires(now):
            fired.append(step)
            when.saved(now)
    return fired


def test_steps() -> None:
    run = list(range(1, 31))
    assert steps_of(tsck.every_steps(10), run) == [10, 20, 30]
    assert steps_of(tsck.at_steps([3, 29, 99]), run) == [3, 29]
    assert steps_of(tsck.first() | tsck.at_steps([2]), run) == [1, 2]
    assert steps_of(tsck.at_fraction(0.25), run, total_steps=30) == [8, 16, 24]
    assert steps_of(tsck.at_fraction([0.1, 0.25, 0.5, 0.75, 0.9]), run, total_steps=30) == [3, 8, 15, 22, 27]
    assert steps_of(tsck.at_fraction([0.5, 1]), [10, 40], total_steps=30) == [40]
    assert steps_of(tsck.last() | tsck.every_steps(20), run, total_steps=30) == [20, 30]
    assert steps_of(tsck.every_steps(2) & tsck.every_steps(3), run) == [6, 12, 18, 24, 30]


@given(st.integers(1, 20), st.lists(st.integers(1, 5), min_size=1, max_size=60))
def test_multiples_that_are_jumped_over_are_not_lost(every: int, strides: list[int]) -> None:
    steps, step = [], 0
    for stride in strides:
        step += stride
        steps.append(step)
    fired = steps_of(tsck.every_steps(every), steps)
    assert len(fired) == len({s // every for s in steps} - {0})


def test_epochs() -> None:
    when = tsck.every_epochs(0.5)
    fired: list[float] = []
    for tenth in range(1, 25):
        moment = TriggerContext(tenth, epoch=tenth / 10, previous_epoch=(tenth - 1) / 10)
        if when.fires(moment):
            fired.append(tenth / 10)
    assert fired == [0.5, 1.0, 1.5, 2.0]


def test_metrics() -> None:
    values = [math.nan, 3.0, 2.9, 2.95, 2.0, 2.0, math.inf, 1.0]
    better = tsck.on_improvement("loss", min_delta=0.5)
    assert [better.fires(TriggerContext(step, metrics={"loss": value})) for step, value in enumerate(values)] == [
        False, True, False, False, True, False, False, True,
    ]  # fmt: skip
    assert not better.fires(TriggerContext(99))
    low = tsck.on_metric("loss < 2.5")
    assert [low.fires(TriggerContext(step, metrics={"loss": value})) for step, value in enumerate(values)] == [
        False, False, False, False, True, False, False, True,
    ]  # fmt: skip
    up = tsck.on_improvement("acc", direction="max")
    assert [up.fires(TriggerContext(step, metrics={"acc": value})) for step, value in enumerate([0.1, 0.3, 0.2, 0.4])] == [
        True,
        True,
        False,
        True,
    ]


def test_time_counts_from_the_last_snapshot() -> None:
    now = 0.0
    every = tsck.every_seconds("1m", clock=lambda: now)
    when = every | tsck.at_steps([2])
    fired = []
    for step in range(1, 10):
        now += 25.0
        every.since = step if every.since is None and every.wants() else every.since
        if when.fires(TriggerContext(step)):
            fired.append(step)
            when.saved(TriggerContext(step))
    assert fired == [2, 5, 8]


def test_auto_goes_by_what_was_measured() -> None:
    cheap, dear = tsck.auto(mtbf="4h"), tsck.auto(mtbf="4h")
    cheap.measured(0.5, 10.0, 60.0, None)
    dear.measured(60.0, 10.0, 60.0, None)
    assert 60 < cheap.seconds < 300
    assert 900 < dear.seconds < 2000


def test_a_signal_is_answered_once() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        when = tsck.on_preemption(signal.SIGUSR1)
        [told] = when.decided()
        assert not told.wants()
        signal.raise_signal(signal.SIGUSR1)
        assert told.wants()
        assert came == [signal.SIGUSR1], "whoever was told before still is"
        told.since = 7
        assert [when.fires(TriggerContext(step)) for step in (6, 7)] == [False, True]
        when.saved(TriggerContext(7))
        assert not told.wants()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_joined_triggers_announce_what_one_rank_decides() -> None:
    when = (tsck.every_steps(5) & tsck.every_seconds(60)) | tsck.auto()
    assert [type(each).__name__ for each in when.decided()] == ["every_seconds", "auto"]
    assert all(isinstance(each, DecidedTrigger) for each in when.decided())


@pytest.mark.parametrize(
    "make",
    [
        lambda: tsck.every_steps(0),
        lambda: tsck.every_steps(1.5),  # type: ignore[arg-type]
        lambda: tsck.every_steps(True),
        lambda: tsck.at_steps(["1"]),  # type: ignore[list-item]
        lambda: tsck.every_epochs(0),
        lambda: tsck.every_epochs(math.nan),
        lambda: tsck.every_seconds("soon"),
        lambda: tsck.every_seconds(0),
        lambda: tsck.at_fraction(0),
        lambda: tsck.at_fraction(1.1),
        lambda: tsck.on_improvement("loss", direction="down"),
        lambda: tsck.on_improvement("loss", min_delta=-1),
        lambda: tsck.on_improvement(""),
        lambda: tsck.on_metric(5),  # type: ignore[arg-type]
        lambda: tsck.on_metric("loss <"),
        lambda: tsck.every_steps(1) | 5,  # type: ignore[operator]
        lambda: tsck.auto(mtbf="never"),
        lambda: tsck.every_epochs(1).fires(TriggerContext(1)),
        lambda: tsck.at_fraction(0.1).fires(TriggerContext(1)),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(InvalidOptionError):
        make()


@pytest.mark.parametrize(
    ("text", "numbers", "holds"),
    [
        ("loss < 2.1 and step > 5000", {"loss": 2.0, "step": 5000}, False),
        ("loss != 1", {}, False),
        ("not loss < 1", {"loss": math.nan}, True),
        ("x < inf", {"x": 1, "inf": math.inf}, True),
        ("(" * 300 + "x < 1" + ")" * 300, {"x": 0}, True),
        ("\"val/acc\" >= .5 AND metric('val/acc') <> 1", {"val/acc": 0.5}, True),
        ("x in (1, -2) and x not in (3)", {"x": -2}, True),
        ("x in (1) or x not in (1)", {}, False),
        ("x between 1 and 2 and not x not between 1 and 2", {"x": 2}, True),
        ("x is null and y is not null and y is nan and x is not nan", {"y": math.nan}, True),
    ],
)
def test_conditions_on_metrics(text: str, numbers: dict[str, float], holds: bool) -> None:
    """The language is tested in `tests.common.test_conditions`."""
    assert condition(text)(numbers) is holds


def test_what_is_no_condition_on_metrics() -> None:
    other_types = ["x < 'a'", "x like 'a%'", "x < 7d", "x in (1, 'a')"]
    of_python = ["x.y < 1", "f(x) < 1", "__import__('os').system('x') < 1", "x ** 9 ** 9 < 1", "lambda: 1", "x := 1", "[x] < 1"]
    for text in ["", "x", "1", "x in y", "x < 1 <", "x < " + "1" * 2000, *other_types, *of_python]:
        with pytest.raises(InvalidOptionError):
            condition(text)

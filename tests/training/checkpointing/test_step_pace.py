"""Writes in the background that slow steps down become slower themselves, but for no longer than until the next save comes."""

import math
from typing import cast

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.save_progress import STAGES, Progress
from tensorstore_ck.session.save import PendingSnapshot
from tensorstore_ck.training.checkpointing.step_pace import StepPace
from tests.session.save.places import scene, state_of

STEP = 0.1
STORE_RATE = 1e9
"""What the store takes."""


class FakeSave:
    """As many bytes as it has, at the rate that the limit permits."""

    def __init__(self, size: float) -> None:
        self.size, self.written = size, 0.0

    def write(self, rate: float, seconds: float) -> None:
        self.written = min(self.size, self.written + rate * seconds)

    def done(self) -> bool:
        return self.written >= self.size

    def progress(self) -> Progress:
        stage_bytes = dict.fromkeys(STAGES, 0) | {"write": int(self.written)}
        return Progress("write", int(self.written), int(self.size), 0.0, dict.fromkeys(STAGES, 0.0), stage_bytes)


class Training:
    """Steps of `STEP` seconds, `harm` times as long while bytes are written at `STORE_RATE`, and less at a lower rate."""

    def __init__(self, harm: float) -> None:
        self.now, self.harm = 0.0, harm
        self.limit = RateLimit(clock=lambda: self.now)
        self.pace = StepPace(self.limit, "write", lambda: self.now)
        self.saves: list[tuple[FakeSave, float]] = []
        self.seconds: list[float] = []
        """Of the steps with a save."""
        self.ended: list[float] = []
        """The seconds that each save took."""
        self.late = 0
        """How often a save came while the one before was in progress."""

    @property
    def pending(self) -> list[tuple[PendingSnapshot, float]]:
        return cast(list[tuple[PendingSnapshot, float]], self.saves)

    def save(self, size: float) -> None:
        self.late += bool(self.saves)
        self.pace.note_save(self.now)
        self.saves.append((FakeSave(size), self.now))

    def step(self, count: int = 1, extra_seconds: float = 0.0) -> None:
        for _ in range(count):
            self.pace.begin_step(self.pending)
            self.limit.take(0)  # as a writer does, whatever happens: a limit that has run out ends
            rate = min(self.limit.rate, STORE_RATE)
            seconds = STEP * (1 + (self.harm - 1) * rate / STORE_RATE if self.saves else 1) + extra_seconds
            self.now += seconds
            if self.saves:
                self.saves[0][0].write(rate, seconds)
                self.seconds.append(seconds)
            self.pace.end_step(self.pending)
            self.ended += [self.now - began for save, began in self.saves if save.done()]
            self.saves = [(save, began) for save, began in self.saves if not save.done()]

    def run(self, saves: int, steps: int, size: float) -> None:
        for _ in range(saves):
            self.save(size)
            self.step(steps)


def test_writes_slow_down_until_steps_are_as_fast_as_without_a_save() -> None:
    training = Training(harm=1.5)
    training.step(20)
    training.run(6, steps=200, size=2e9)
    assert training.seconds[0] == pytest.approx(1.5 * STEP), "nothing is limited before the interval is known"
    assert training.ended[0] == pytest.approx(2, abs=0.2)
    training.seconds.clear()
    training.run(1, steps=200, size=2e9)
    settled = sorted(training.seconds)[len(training.seconds) // 2]
    assert settled <= 1.08 * STEP, "as slow as a save may be that has to end in time"
    assert training.ended[-1] > 12
    assert training.late == 0


@pytest.mark.parametrize("size", [1e8, 1e9, 1e10, 1.5e10])
@pytest.mark.parametrize("harm", [1.0, 1.01, 1.05, 3.0])
def test_no_save_ends_later_than_the_next_one_comes(harm: float, size: float) -> None:
    """Whatever the steps do, if the store takes it in time at all."""
    training = Training(harm)
    training.step(20)
    training.run(12, steps=200, size=size)
    assert (len(training.ended), training.late) == (12, 0)


def test_writes_that_do_no_harm_are_not_slowed_down() -> None:
    training = Training(harm=1.01)
    training.step(20)
    training.run(8, steps=100, size=2e9)
    assert max(training.ended) == pytest.approx(2, rel=0.1)


def test_the_next_save_and_one_that_is_waited_for_end_the_limit() -> None:
    training = Training(harm=1.5)
    training.step(20)
    training.run(4, steps=200, size=2e9)
    training.save(2e9)
    training.step(12)
    assert training.limit.rate < math.inf
    training.pace.release()
    assert training.limit.rate == math.inf, "somebody waits"
    training.step()
    assert training.limit.rate < math.inf
    training.save(2e9)
    assert training.limit.rate == math.inf
    training.step()
    assert training.limit.rate == math.inf, "while two are in progress"


def test_a_training_that_no_longer_steps_leaves_no_limit() -> None:
    """Such as in an evaluation, or in a wait for the save."""
    training = Training(harm=1.5)
    training.step(20)
    training.run(4, steps=200, size=2e9)
    training.save(2e9)
    training.step(12)
    assert training.limit.rate < math.inf
    training.now += 10 * STEP
    training.limit.take(0)
    assert training.limit.rate == math.inf


def test_one_slow_step_means_nothing() -> None:
    training = Training(harm=1.0)
    training.step(20)
    for _ in range(4):
        training.save(4e9)
        for number in range(100):
            training.step(extra_seconds=0.1 if number % 7 == 3 else 0.0)
            assert training.limit.rate == math.inf


def test_steps_before_the_first_and_saves_at_every_step_change_nothing() -> None:
    training = Training(harm=2.0)
    training.pace.end_step(training.pending)
    for _ in range(50):
        training.save(5e7)
        training.step()
    assert training.limit.rate == math.inf, "there is no step without a save to compare with"


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_checkpointer_watches_its_steps(*, adaptive: bool) -> None:
    now = 0.0
    state = state_of(0)
    with scene() as place:
        writes = place.store.engine.writes
        when = tsck.at_steps([20, 40, 60])
        ckpt = tsck.Checkpointer(place.store, state, ref="job", when=when, adaptive=adaptive, clock=lambda: now)

        def run(first: int, last: int, seconds: float) -> None:
            nonlocal now
            for step in range(first, last + 1):
                now += seconds
                state["w"].fill_(step)
                ckpt.step(step)
                if step in (20, 40):
                    ckpt.wait()

        run(1, 59, seconds=1.0)
        before = place.gate.stop("open packs/")
        run(60, 60, seconds=1.0)
        before.await_reached()
        at_end = place.gate.stop("put parts/")
        before.let_go()
        at_end.await_reached()
        run(61, 65, seconds=1.1)
        assert (writes.rate < math.inf) == adaptive
        at_end.let_go()
        ckpt.close()
        assert writes.rate == math.inf
        assert place.steps() == [20, 40, 60]

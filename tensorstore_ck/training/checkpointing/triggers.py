"""Triggers decide at each step whether to save. `|` and `&` join them.

Most depend on the step, the epoch and the metrics, so all ranks decide the same without communication. One that uses a clock or a signal
(`DecidedTrigger`) is decided by one rank, which announces the step from which it fires; see `step_flag`.
"""

import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final, NamedTuple

from tensorstore_ck.common.metric_condition import condition
from tensorstore_ck.common.units import parse_seconds
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.maintenance.optimal_interval import DEFAULT_MTBF_SECONDS, SaveCosts, best, require_costs

FIRST_SECONDS: Final = 600.0
"""The interval of `auto` until costs are measured."""
CLOCK: Final = time.monotonic


class TriggerContext(NamedTuple):
    """The position of a run at one step."""

    step: int
    """The number of completed steps; usually 1 at the first call."""
    epoch: float | None = None
    total_steps: int | None = None
    metrics: Mapping[str, float] = {}
    is_first: bool = False
    """Whether no step came before it, in this run and the runs that it resumes."""
    is_last: bool = False
    previous_step: int | None = None
    """The step of the previous call, or of the resume."""
    previous_epoch: float | None = None

    def after(self, before: "TriggerContext | None") -> "TriggerContext":
        """This moment with `before` as the previous call."""
        if before is None:
            return self._replace(is_first=True)
        return self._replace(previous_step=before.step, previous_epoch=before.epoch)


@short_errors
class Trigger(ABC):
    """Decides whether to save."""

    @property
    def name(self) -> str:
        """Its name in snapshots and retention rules; empty: nothing."""
        return type(self).__name__

    @abstractmethod
    def fires(self, moment: TriggerContext) -> bool:
        """Whether to save now; called once at each step."""

    def causes(self) -> Iterator[str]:
        """The names of the triggers inside this one that fired. Called after `fires` returned True."""
        if self.name:
            yield self.name

    def saved(self, moment: TriggerContext) -> None:  # noqa: B027 - most have nothing to remember
        """Called after a save at this moment, whichever trigger caused it."""

    def decided(self) -> "Iterator[DecidedTrigger]":
        """The triggers inside this one that one rank decides."""
        return iter(())

    def __or__(self, other: "Trigger") -> "Trigger":
        return _Joined(any, self, other)

    def __and__(self, other: "Trigger") -> "Trigger":
        return _Joined(all, self, other)


class _Joined(Trigger):
    def __init__(self, join: Callable[[Collection[bool]], bool], *triggers: Trigger) -> None:
        for trigger in triggers:
            if not isinstance(trigger, Trigger):
                raise InvalidOptionError(f"{trigger!r} is not a trigger such as every_steps(1000)", object_id="when")
        self._join, self._triggers = join, triggers
        self._fired: list[bool] = []

    def fires(self, moment: TriggerContext) -> bool:
        self._fired = [trigger.fires(moment) for trigger in self._triggers]  # no short circuit: some triggers count calls
        return self._join(self._fired)

    def causes(self) -> "Iterator[str]":
        for trigger, fired in zip(self._triggers, self._fired, strict=True):
            if fired:
                yield from trigger.causes()

    def saved(self, moment: TriggerContext) -> None:
        for trigger in self._triggers:
            trigger.saved(moment)

    def decided(self) -> "Iterator[DecidedTrigger]":
        for trigger in self._triggers:
            yield from trigger.decided()


class _Named(Trigger):
    def __init__(self, name: str, holds: Callable[[TriggerContext], bool]) -> None:
        self._name, self._holds = name, holds

    @property
    def name(self) -> str:
        return self._name

    def fires(self, moment: TriggerContext) -> bool:
        return self._holds(moment)


class DecidedTrigger(Trigger):
    """Decided by one rank: fires from a step that is announced in advance, until the next save."""

    def __init__(self, *, any_rank: bool = False) -> None:
        """`any_rank`: any rank may ask for it, not only the first."""
        self.any_rank = any_rank
        self.since: int | None = None
        """The step from which it fires."""

    @abstractmethod
    def wants(self) -> bool:
        """Whether this rank asks for a save."""

    def fires(self, moment: TriggerContext) -> bool:
        """See `Trigger` and `DecidedTrigger`."""
        return self.since is not None and moment.step >= self.since

    def saved(self, moment: TriggerContext) -> None:
        """See `Trigger` and `DecidedTrigger`."""
        self.since = None
        self.begin()

    def begin(self) -> None:
        """Restarts the measurement."""

    def decided(self) -> "Iterator[DecidedTrigger]":
        """See `Trigger` and `DecidedTrigger`."""
        yield self


def require_count(value: object, what: str) -> int:
    """`value`, if it is a whole number from 1 on; else an error that calls it `what`."""
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise InvalidOptionError(f"{what} must be a whole number from 1 on, not {value!r}", object_id=what)


@short_errors
def every_steps(steps: int) -> Trigger:
    """At each multiple of `steps`; if a call covers several steps, as soon as one is passed."""
    count = require_count(steps, "steps")
    return _Named("every_steps", lambda moment: moment.step // count > (moment.previous_step or 0) // count)


@short_errors
def at_steps(steps: Collection[int]) -> Trigger:
    """At these steps."""
    if not all(type(step) is int for step in steps):
        raise InvalidOptionError(f"at_steps takes steps, not {steps!r}", object_id="steps")
    chosen = frozenset(steps)
    return _Named("at_steps", lambda moment: moment.step in chosen)


@short_errors
def every_epochs(epochs: float) -> Trigger:
    """At each multiple of `epochs`; needs ``epoch=`` in `Checkpointer.step`."""
    if not (isinstance(epochs, int | float) and not isinstance(epochs, bool) and math.isfinite(epochs) and epochs > 0):
        raise InvalidOptionError(f"epochs must be a number larger than 0, not {epochs!r}", object_id="epochs")

    def holds(moment: TriggerContext) -> bool:
        if moment.epoch is None:
            raise InvalidOptionError("every_epochs needs the epoch: step(step, epoch=...)", object_id="epoch")
        return moment.epoch // epochs > (moment.previous_epoch or 0) // epochs

    return _Named("every_epochs", holds)


@short_errors
def at_fraction(fraction: float | Collection[float]) -> Trigger:
    """Each time that a fraction of the training has passed: ``at_fraction(0.1)`` fires ten times. Or once at each fraction of a list.

    ``at_fraction([0.1, 0.25, 0.5, 0.75, 0.9])`` fires five times. Policies keep what it saved: see `keep_milestones` in `Store.set_policy`.
    Needs ``total_steps=`` in `Checkpointer`.
    """
    several = [fraction] if isinstance(fraction, int | float) else list(fraction)
    for share in several:
        if not (isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1):
            raise InvalidOptionError(f"a fraction must be larger than 0 and at most 1, not {share!r}", object_id="fraction")

    def holds(moment: TriggerContext) -> bool:
        if moment.total_steps is None:
            raise InvalidOptionError("at_fraction needs the length of the training: Checkpointer(total_steps=...)", object_id="total_steps")
        before, steps = moment.previous_step or 0, [max(1, round(share * moment.total_steps)) for share in several]
        if isinstance(fraction, int | float):
            return moment.step // steps[0] > before // steps[0]
        return any(before < step <= moment.step for step in steps)

    return _Named("at_fraction", holds)


@short_errors
def first() -> Trigger:
    """At the first step of a run that resumes no snapshot."""
    return _Named("first", lambda moment: moment.is_first)


@short_errors
def last() -> Trigger:
    """At ``Checkpointer.step(last=True)``, or at `total_steps`."""
    return _Named("last", lambda moment: moment.is_last or moment.step == moment.total_steps)


@short_errors
class on_improvement(Trigger):  # noqa: N801 - reads like the functions next to it
    """When a metric improves on its best value in this run by more than `min_delta`. All ranks must pass the same value."""

    def __init__(self, metric: str, *, min_delta: float = 0.0, direction: str = "min") -> None:
        if direction not in ("min", "max") or not metric or not (math.isfinite(min_delta) and min_delta >= 0):
            raise InvalidOptionError(
                'on_improvement takes a metric, min_delta from 0 on, and direction="min" or "max"', object_id=str(metric)
            )
        self._metric, self._min_delta, self._sign = metric, min_delta, 1.0 if direction == "min" else -1.0
        self.best = math.nan
        """The best value so far; NaN values do not count."""

    def fires(self, moment: TriggerContext) -> bool:
        """See `Trigger` and `DecidedTrigger`."""
        value = moment.metrics.get(self._metric, math.nan)
        if math.isnan(value) or self._sign * value >= self._sign * self.best - self._min_delta:
            return False
        self.best = value
        return True


@short_errors
def on_metric(holds: str | Callable[[Mapping[str, float]], bool]) -> Trigger:
    """When a condition becomes true: ``"val_loss < 2.1 and step > 5000"``, or a function of the metrics."""
    rule = condition(holds) if isinstance(holds, str) else holds
    if not callable(rule):
        raise InvalidOptionError(
            f"on_metric takes a condition such as 'val_loss < 2.1', or a function, not {holds!r}", object_id="on_metric"
        )
    held = False

    def rises(moment: TriggerContext) -> bool:
        nonlocal held
        before, held = held, bool(rule({**moment.metrics, "step": moment.step}))
        return held and not before

    return _Named("on_metric", rises)


@short_errors
class every_seconds(DecidedTrigger):  # noqa: N801 - see `on_improvement`
    """When this time has passed since the last snapshot, by the clock of rank 0: seconds, or ``"15m"``."""

    def __init__(self, seconds: float | str, *, clock: Callable[[], float] = CLOCK) -> None:
        super().__init__()
        self.seconds = parse_seconds(seconds, "seconds")
        if self.seconds <= 0:
            raise InvalidOptionError("seconds must be more than 0", object_id="seconds")
        self._clock = clock
        self._began = clock()

    def begin(self) -> None:
        """See `Trigger` and `DecidedTrigger`."""
        self._began = self._clock()

    def wants(self) -> bool:
        """See `Trigger` and `DecidedTrigger`."""
        return self._clock() - self._began >= self.seconds


@short_errors
class auto(every_seconds):  # noqa: N801 - see `on_improvement`
    """At the interval that loses the least time, given the measured costs of this run; see `optimal_interval.best`."""

    def __init__(self, *, mtbf: float | str | None = None, clock: Callable[[], float] = CLOCK) -> None:
        """`mtbf`: mean time between failures; by default estimated from this run's resumes, or four hours before the first."""
        super().__init__(FIRST_SECONDS, clock=clock)
        self.mtbf_seconds = None if mtbf is None else parse_seconds(mtbf, "mtbf")

    def measured(self, stall: float, lag: float, restart: float, run_mtbf: float | None) -> None:
        """Takes the costs that the run has measured so far."""
        mtbf = self.mtbf_seconds or run_mtbf or DEFAULT_MTBF_SECONDS
        self.seconds = best(require_costs(SaveCosts(stall, lag, restart, mtbf)))


@short_errors
class on_preemption(DecidedTrigger):  # noqa: N801 - see `on_improvement`
    """When any rank gets a signal that its machine will go away: SIGTERM, or those given. See `Checkpointer.preempted`."""

    def __init__(self, *signals: int) -> None:
        super().__init__(any_rank=True)
        self._came = Flag()
        for number in signals or (signal.SIGTERM,):
            before = signal.getsignal(number)

            def handle(got: int, frame: object, before: object = before) -> None:
                self._came.set()
                if callable(before):
                    before(got, frame)

            try:
                signal.signal(number, handle)
            except (ValueError, OSError) as exc:
                raise InvalidOptionError(f"on_preemption cannot handle signal {number}: {exc}", object_id="on_preemption") from exc

    def begin(self) -> None:
        """See `Trigger` and `DecidedTrigger`."""
        self._came.clear()

    def wants(self) -> bool:
        """See `Trigger` and `DecidedTrigger`."""
        return self._came.is_set()

"""The rules of a policy: what each keeps, the limits, and what happens to snapshots as they age. Pure."""

import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, NamedTuple, Self

from tensorstore_ck.backend.cold.locations import check_location
from tensorstore_ck.common.units import parse_bytes, parse_rate, parse_seconds, typed_bytes
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.format.record import MAX_TRIGGERS, are_triggers
from tensorstore_ck.log.field_checks import STEP

MAX_COUNT: Final = 1 << 53
MIN_SECONDS: Final = 0.001
"""Shorter durations mean nothing, and dividing by one can overflow."""
MAX_STEPS: Final = 1000
MAX_METRICS: Final = 16
MAX_STAGES: Final = 8
MILESTONES: Final = ("at_steps", "at_fraction")
"""Triggers at moments of a training that the user named."""
TRIGGERS: Final = (
    *(*MILESTONES, "every_steps", "every_epochs", "every_seconds", "auto"),
    *("first", "last", "on_improvement", "on_metric", "on_preemption"),
)
"""The triggers of `training.checkpointing`."""
DIRECTIONS: Final = ("min", "max")
_WHOLE: Final = re.compile(r"\s*-?[0-9]{1,18}\s*")
_BESTS: Final = re.compile(r"[^:,]+:[^,]+:(min|max)(,[^:,]+:[^,]+:(min|max))*")


class Best(NamedTuple):
    """A number of snapshots with the best values of a metric."""

    snapshots: int
    metric: str
    direction: str
    """``min``: the lowest are best; ``max``: the highest."""


class AgeStage(NamedTuple):
    """A location for packs that only older snapshots need."""

    after_seconds: float
    url: str


@dataclass(frozen=True, slots=True)
class Policy:
    """A snapshot stays if any of the rules ``keep_...`` keeps it, within the limits.

    The newest snapshot, the newest other unmarked one, and all tagged or pinned ones stay in any case. Only `keep_younger` keeps
    snapshots that are marked bad or damaged.
    """

    keep_last: int = 0
    """This many of the newest."""
    keep_best: tuple[Best, ...] = ()
    keep_every: int = 0
    """The first at or after each multiple of this many steps."""
    keep_epochs: int = 0
    """The first at or after each multiple of this many epochs."""
    keep_every_seconds: float = 0.0
    """The first in each period of this many seconds since 1970."""
    keep_steps: tuple[int, ...] = ()
    """Those of these steps."""
    keep_triggers: tuple[str, ...] = ()
    """Those that one of these triggers caused."""
    keep_milestones: bool = True
    """Those that a trigger in `MILESTONES` caused. Applies in addition to the other rules."""
    keep_first: bool = False
    keep_younger: float = 0.0
    """All that were made less than this many seconds ago."""
    expire_after: float = 0.0
    """Limit: older ones expire."""
    max_bytes: int = 0
    """Limit: the kept ones together use at most this many bytes of the store; the oldest expire first."""
    recode_after: float = 0.0
    """Ageing: after this many seconds they are encoded as small as possible."""
    move_after: tuple[AgeStage, ...] = ()
    """Ageing: when they are moved to cold locations."""
    max_write_rate: float = 0.0
    """Pace: the bytes per second that all jobs which save to these branches may write together; see `write_share`."""

    @property
    def keeps(self) -> bool:
        """Whether it has rules that keep snapshots; else it has only rules of ageing or of pace, and everything stays."""
        return any(getattr(self, rule.name) for rule in fields(self) if rule.name.startswith("keep_") and not rule.default)

    @property
    def ages(self) -> bool:
        """Whether it has rules of ageing."""
        return bool(self.recode_after or self.move_after)

    @classmethod
    def of(cls, **rules: object) -> Self:
        """A policy from rules as users write them, or as the log has them.

        Such as ``keep_best=(3, "val_loss", "min")``, ``expire_after="30d"``, ``max_bytes="2TB"``.

        Raises:
            InvalidOptionError: an unknown rule, an invalid value, rules that contradict each other, or none that keeps anything.
        """
        known = {field.name for field in fields(cls)}
        for name in rules.keys() - known:
            similar = [f"did you mean {each}? " for each in difflib.get_close_matches(str(name), known, 1)]
            advice = f"{''.join(similar)}There are {', '.join(sorted(known))}"
            raise InvalidOptionError(f"there is no rule {name!r}: {advice}", object_id=str(name))
        parsed: dict[str, Any] = {name: _PARSERS[name](value, name) for name, value in rules.items() if value is not None}
        policy = cls(**parsed)
        if not policy.keeps and (policy.expire_after or policy.max_bytes or not (policy.ages or policy.max_write_rate)):
            raise InvalidOptionError(
                "a policy needs a rule that keeps something, such as keep_last=5 or keep_younger='30d': limits alone would keep nothing",
                object_id="policy",
            )
        if policy.expire_after and policy.keep_younger > policy.expire_after:
            raise InvalidOptionError("keep_younger is longer than expire_after, which would expire what it keeps", object_id="keep_younger")
        return policy

    @classmethod
    def of_rules(cls, rules: object) -> Self:
        """A policy from a dict of rules, as `of` takes them.

        Raises:
            InvalidOptionError: it is no dict with names as keys; or see `of`.
        """
        if not isinstance(rules, Mapping) or not all(isinstance(name, str) for name in rules):
            raise InvalidOptionError(f"a policy is a dict of rules, such as {{'keep_last': 5}}, not {rules!r}", object_id="policy")
        return cls.of(**rules)

    def encode(self) -> dict[str, Any]:
        """The rules that are set, as lists, numbers and texts, for the log."""
        set_rules = {field.name: getattr(self, field.name) for field in fields(self) if getattr(self, field.name) != field.default}
        return {name: _listed(value) for name, value in set_rules.items()}

    def __str__(self) -> str:
        """As `tsck policy` shows it."""
        return ", ".join(f"{name} {_shown(name, value)}" for name, value in self.encode().items())


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


def _count(value: object, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT:
        return value
    raise InvalidOptionError(f"{name} must be a whole number of at least 1, not {value!r}", object_id=name)


def _seconds(value: object, name: str) -> float:
    seconds = parse_seconds(value, name)
    if seconds < MIN_SECONDS:
        raise InvalidOptionError(f"{name} must be at least {MIN_SECONDS} seconds, not {value!r}", object_id=name)
    return seconds


def _bytes(value: object, name: str) -> int:
    return _count(parse_bytes(value, name), name)


def _rate(value: object, name: str) -> float:
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise InvalidOptionError(f"{name} must be a rate such as '500MB', not {value!r}", object_id=name)
    return float(parse_rate(value))


def _steps(value: object, name: str) -> tuple[int, ...]:
    if isinstance(value, list | tuple) and 0 < len(value) <= MAX_STEPS and all(type(step) is int and STEP.accepts(step) for step in value):
        return tuple(sorted(set(value)))
    raise InvalidOptionError(f"{name} must be a list of at most {MAX_STEPS:,} steps, not {value!r}", object_id=name)


def _items(value: object) -> Sequence[object]:
    """The items of a list of lists; any other value is the only item."""
    return value if isinstance(value, list | tuple) and value and all(isinstance(item, list | tuple) for item in value) else [value]


def _bests(value: object, name: str) -> tuple[Best, ...]:
    if len(_items(value)) > MAX_METRICS:
        raise InvalidOptionError(f"{name} may name at most {MAX_METRICS} metrics", object_id=name)
    bests = []
    for best in _items(value):
        if not (isinstance(best, list | tuple) and len(best) == 3 and isinstance(best[1], str) and best[1] and best[2] in DIRECTIONS):
            raise InvalidOptionError(
                f'{name} must be like (3, "val_loss", "min"), or {name}=3:val_loss:min at a shell, not {best!r}', object_id=name
            )
        bests.append(Best(_count(best[0], name), best[1], best[2]))
    for one in bests:
        if any(one.metric == other.metric and one != other for other in bests):
            raise InvalidOptionError(f"{name} has two different rules for {one.metric!r}", object_id=name)
    return tuple(dict.fromkeys(bests))


def _stages(value: object, name: str) -> tuple[AgeStage, ...]:
    stages = []
    for stage in _items(value):
        if not (isinstance(stage, list | tuple) and len(stage) == 2):
            raise InvalidOptionError(
                f'{name} must be like ("30d", "s3://bucket/cold"), or {name}=30d:s3://bucket/cold at a shell, not {stage!r}', object_id=name
            )
        stages.append(AgeStage(_seconds(stage[0], name), check_location(stage[1])))
    if len(stages) > MAX_STAGES or len({stage.after_seconds for stage in stages}) < len(stages):
        raise InvalidOptionError(f"{name} must have at most {MAX_STAGES} stages, at different ages", object_id=name)
    return tuple(sorted(stages))


def _names(value: object, name: str) -> tuple[str, ...]:
    several = [value] if isinstance(value, str) else value
    if isinstance(several, tuple | list) and several and are_triggers(list(several)):
        return tuple(dict.fromkeys(several))
    raise InvalidOptionError(f"{name} must be a list of up to {MAX_TRIGGERS} names such as 'every_epochs', not {value!r}", object_id=name)


def _flag(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return value
    raise InvalidOptionError(f"{name} must be True or False, not {value!r}", object_id=name)


_PARSERS: Final = {
    "keep_last": _count,
    "keep_best": _bests,
    "keep_every": _count,
    "keep_epochs": _count,
    "keep_every_seconds": _seconds,
    "keep_steps": _steps,
    "keep_triggers": _names,
    "keep_milestones": _flag,
    "keep_first": _flag,
    "keep_younger": _seconds,
    "expire_after": _seconds,
    "max_bytes": _bytes,
    "recode_after": _seconds,
    "move_after": _stages,
    "max_write_rate": _rate,
}
_UNITS: Final = (("w", 604_800), ("d", 86_400), ("h", 3600), ("m", 60))


def _shown(name: str, value: Any) -> str:
    if name == "keep_best":
        return "; ".join(f"{count} by {direction} {metric}" for count, metric, direction in value)
    if name == "max_bytes":
        return typed_bytes(value)
    if name == "max_write_rate":
        return f"{typed_bytes(int(value))}/s"
    if name == "move_after":
        return "; ".join(f"{_length(seconds)} to {url}" for seconds, url in value)
    if isinstance(value, float):
        return _length(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _length(seconds: float) -> str:
    whole = (f"{seconds / size:g}{unit}" for unit, size in _UNITS if seconds >= size and math.fmod(seconds, size) == 0)
    return next(whole, f"{seconds:g}s")


def parse_rule(name: str, text: str) -> object:
    """The value for `Store.set_policy` from a command line or a form: `keep_best=3:val_loss:min`.

    Returns text that does not parse unchanged; `set_policy` rejects it.
    """
    if name in ("keep_last", "keep_every", "keep_epochs"):
        return _number(text)
    if name == "keep_steps":
        return [_number(step) for step in text.split(",")]
    if name == "keep_triggers":
        return text.split(",")
    if name == "keep_milestones":
        return {"yes": None, "true": None, "no": False, "false": False}.get(text.lower(), text)
    if name == "keep_best":
        return [_best(item) for item in text.split(",")] if _BESTS.fullmatch(text) else text
    if name == "move_after":
        stages = [tuple(item.split(":", 1)) for item in text.split(",")]
        return stages if all(len(stage) == 2 for stage in stages) else text
    if name == "keep_first":
        return {"yes": True, "true": True, "no": None, "false": None}.get(text.lower(), text)
    return text


def _number(text: str) -> object:
    return int(text) if _WHOLE.fullmatch(text) else text


def _best(text: str) -> tuple[object, ...]:
    count, _, rest = text.partition(":")
    metric, _, direction = rest.rpartition(":")
    return (_number(count), metric, direction)

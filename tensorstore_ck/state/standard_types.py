"""Types of the standard library that training states hold, and a user's dataclasses and enums: stored as plain values, without pickle.

Type names from a store are only looked up in this table: no class is imported or called because stored data names it. A dataclass comes
back as the dict of its fields, and an enum member as its value, where no class of that name is registered, or in the target of a restore.
"""

import dataclasses
from argparse import Namespace
from collections import deque
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from functools import partial
from pathlib import PosixPath, PurePosixPath
from types import SimpleNamespace
from typing import Any, Final
from uuid import UUID

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.state.torchao_types import RegisteredType

_DATACLASS: Final = "dataclass:"
_ENUM: Final = "enum:"


def standard_class(cls: type[Any]) -> RegisteredType | None:
    """How instances of exactly `cls` are stored; None if it is none of these types."""
    return _BY_CLASS.get(cls) or _users_class(cls)


def standard_name(name: str) -> RegisteredType | None:
    """How a stored value of that name is rebuilt without a class of the user's; None if it is none of these types."""
    if name.startswith(_DATACLASS):
        return RegisteredType(object, name, dict, partial(_rebuilt, name, _plain_fields))
    if name.startswith(_ENUM):
        return RegisteredType(object, name, dict, partial(_rebuilt, name, lambda state: state["value"]))
    return _BY_NAME.get(name)


def _users_class(cls: type[Any]) -> RegisteredType | None:
    """A dataclass or enum of the user's."""
    if cls.__module__.partition(".")[0] in _OTHERS:
        return None
    path = f"{cls.__module__}:{cls.__qualname__}"
    if issubclass(cls, Enum):
        return enum_type(cls, f"{_ENUM}{path}")
    if dataclasses.is_dataclass(cls) and not callable(getattr(cls, "state_dict", None)) and not issubclass(cls, _CONTAINERS):
        return dataclass_type(cls, f"{_DATACLASS}{path}")
    return None


def dataclass_type(cls: type[Any], name: str) -> RegisteredType:
    """A dataclass under a name: its attributes are stored, and set again without a call of ``__init__``."""
    return RegisteredType(cls, name, _attributes, partial(_rebuilt, name, partial(_with_attributes, cls)))


def enum_type(cls: type[Enum], name: str) -> RegisteredType:
    """An enum under a name."""
    return RegisteredType(
        cls, name, lambda member: {"name": member.name, "value": member.value}, partial(_rebuilt, name, partial(_member, cls))
    )


def is_value(cls: type[Any]) -> bool:
    """Whether its instances are values without items, which a restore replaces by whatever is stored."""
    return issubclass(cls, Enum) or (cls in _BY_CLASS and cls not in (Namespace, SimpleNamespace, deque))


def class_path(name: str) -> str | None:
    """``module:qualname`` of the class that a stored dataclass or enum had; None for another name."""
    return next((name.removeprefix(prefix) for prefix in (_DATACLASS, _ENUM) if name.startswith(prefix)), None)


def _rebuilt(name: str, make: Callable[[Any], Any], state: object) -> Any:
    try:
        return make(state)
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as exc:
        raise CorruptObjectError(f"a stored {name} cannot be rebuilt ({exc}); run `tsck fsck`", object_id=name) from exc


def _attributes(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return dict(vars(value))
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
    return {**fields, **getattr(value, "__dict__", {})}


def _plain_fields(state: Any) -> dict[str, Any]:
    if type(state) is not dict:
        raise TypeError("it has no fields")
    return state


def _with_attributes(cls: type[Any], state: Any) -> Any:
    made: Any = cls.__new__(cls)  # type: ignore[call-overload]
    for attribute, value in _plain_fields(state).items():
        object.__setattr__(made, attribute, value)
    return made


def _member(cls: type[Enum], state: Any) -> Enum:
    name = state["name"]
    if type(name) is str and name in cls.__members__:
        return cls[name]
    try:
        return cls(state["value"])  # a combination of flags has no name of its own
    except ValueError:
        raise UnsupportedValueError(
            f"{cls.__qualname__} has no member {name!r} here, and the snapshot has", object_id=cls.__qualname__
        ) from None


def _moment(value: datetime | time) -> list[Any]:
    zone = value.tzinfo
    if zone is not None and type(zone) is not timezone:
        what = f"its time zone is a {type(zone).__module__}.{type(zone).__qualname__}"
        raise UnsupportedValueError(f"cannot store {value!r}: {what}; convert it with .astimezone(datetime.UTC)", object_id="tzinfo")
    return [value.replace(tzinfo=None, fold=0).isoformat(), None if zone is None else _zone(zone), value.fold]


def _moment_of(cls: type[Any], state: Any) -> Any:
    text, zone, fold = state
    return cls.fromisoformat(text).replace(tzinfo=None if zone is None else _zone_of(zone), fold=fold)


def _zone(zone: timezone) -> list[Any]:
    return [_duration(zone.utcoffset(None)), zone.tzname(None)]


def _zone_of(state: Any) -> timezone:
    offset, name = state
    made = timezone(timedelta(*offset))
    return made if made.tzname(None) == name else timezone(timedelta(*offset), name)


def _duration(value: timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _from_text(cls: type[Any], state: Any) -> Any:
    if type(state) is not str:
        raise TypeError("it is no text")
    return cls(state)


_OTHERS: Final = ("tensorstore_ck", "torch")
"""Classes of these packages, such as `Box`, mean something of their own in a state."""
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, str, bytes, int, float)
_TABLE: Final = (
    (Namespace, "argparse.Namespace", _attributes, partial(_with_attributes, Namespace)),
    (SimpleNamespace, "types.SimpleNamespace", _attributes, partial(_with_attributes, SimpleNamespace)),
    (PosixPath, "pathlib.PosixPath", str, partial(_from_text, PosixPath)),
    (PurePosixPath, "pathlib.PurePosixPath", str, partial(_from_text, PurePosixPath)),
    (datetime, "datetime.datetime", _moment, partial(_moment_of, datetime)),
    (date, "datetime.date", date.isoformat, date.fromisoformat),
    (time, "datetime.time", _moment, partial(_moment_of, time)),
    (timedelta, "datetime.timedelta", _duration, lambda state: timedelta(*state)),
    (timezone, "datetime.timezone", _zone, _zone_of),
    (UUID, "uuid.UUID", str, partial(_from_text, UUID)),
    (Decimal, "decimal.Decimal", str, partial(_from_text, Decimal)),
    (Fraction, "fractions.Fraction", lambda value: list(value.as_integer_ratio()), lambda state: Fraction(*state)),
    (range, "range", lambda value: [value.start, value.stop, value.step], lambda state: range(*state)),
    (deque, "collections.deque", lambda value: {"maxlen": value.maxlen, "items": list(value)},
     lambda state: deque(state["items"], state["maxlen"])),
)  # fmt: skip
_BY_NAME: Final = {name: RegisteredType(cls, name, to_state, partial(_rebuilt, name, make)) for cls, name, to_state, make in _TABLE}
_BY_CLASS: Final = {registered.cls: registered for registered in _BY_NAME.values()}

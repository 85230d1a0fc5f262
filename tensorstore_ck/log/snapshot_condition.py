"""Conditions on snapshots in memory, in the language of `tsck find`. Pure.

As there, every test is true or false: a missing value or NaN satisfies no comparison, so it satisfies the ``not`` of every comparison.
"""

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

from tensorstore_ck.common.condition_values import (
    BEFORE,
    ORDERED,
    TEXT_OPS,
    bytes_of,
    check_op,
    date_ns_of,
    named_values_of,
    number_of,
    parse_search,
    roots_of,
    seconds_of,
    texts_of,
    wrong_value,
)
from tensorstore_ck.common.conditions import Condition, Joined, Name, NameTest
from tensorstore_ck.common.similar_names import similar_names
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.log.snapshot import Snapshot, job_of, searchable

_Holds = Callable[[Snapshot], bool]
_COMPARE: Final[Mapping[str, Callable[..., bool]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, *others: value in others,
    "between": lambda value, low, high: low <= value <= high,
    "like": lambda value, pattern: pattern.fullmatch(value) is not None,
}
_BYTES: Final = {"size": "logical_bytes", "logical_bytes": "logical_bytes", "new_bytes": "new_bytes"}
_FIELDS: Final = ("step", "ref", "job", "root", "time", "age", *_BYTES, "mark")
_OF_CATALOG: Final = ("store", "state", "tag", "pinned", "actor")
_ESCAPED: Final = re.compile(r"\\(.)|(%)|(_)|([^\\%_]+)", re.DOTALL)


class SnapshotNames:
    """The fields, metrics and attributes of some snapshots, by which these are filtered and sorted."""

    def __init__(self, snapshots: Sequence[Snapshot], now_ns: int) -> None:
        self._snapshots, self._now_ns = snapshots, now_ns

    def condition(self, text: str) -> _Holds:
        """A function that tells whether a condition holds of a snapshot.

        Raises:
            InvalidOptionError: it is no condition on snapshots; the message says where.
            NotFoundError: no snapshot has a metric or an attribute of a name in it.
        """
        return self._holds(parse_search(text))

    def number(self, text: str) -> Callable[[Snapshot], float]:
        """A function that returns the number of a field, metric or attribute; NaN without one.

        Raises:
            InvalidOptionError: snapshots cannot be sorted by it.
            NotFoundError: no snapshot has it.
        """
        name = Name(text[1:-1], is_metric=True) if len(text) > 2 and text[0] == text[-1] == '"' else Name(text, is_metric=False)
        if name.is_metric or text not in (*_FIELDS, *_OF_CATALOG):
            self._require(name.text)
            return lambda snapshot: next((value for value in _named(snapshot, name.text) if isinstance(value, float)), math.nan)
        if text not in (*_BYTES, "step", "time", "age"):
            raise InvalidOptionError(
                f"cannot sort by {text}: use step, time, age, size, new_bytes, a metric or an attribute", object_id=text
            )
        value = _FIELD_VALUES["time" if text == "age" else text]
        sign = -1 if text == "age" else 1
        return lambda snapshot: math.nan if value(snapshot) is None else sign * value(snapshot)

    def _holds(self, node: Condition) -> _Holds:
        if isinstance(node, Joined):
            parts = [self._holds(part) for part in node.parts]
            if node.how == "not":
                return lambda snapshot: not parts[0](snapshot)
            join = all if node.how == "and" else any
            return lambda snapshot: join(holds(snapshot) for holds in parts)
        assert isinstance(node, NameTest)  # without arithmetic there is no other comparison
        name = node.name
        if name.is_metric or name.text not in (*_FIELDS, *_OF_CATALOG):
            self._require(name.text)
            return self._named_test(node)
        if name.text in _OF_CATALOG:
            raise InvalidOptionError(
                f"{name.text} is not known of a snapshot here: `tsck find` tests it, over a catalog (docs/guides/catalog.md)",
                object_id=name.text,
            )
        return self._field_test(node)

    def _named_test(self, test: NameTest) -> _Holds:
        values: list[Any] = [*named_values_of(test)]
        name, kind = test.name.text, str if test.op in TEXT_OPS and values and isinstance(values[0], str) else float
        if kind is str and not any(isinstance(value, str) for snapshot in self._snapshots for value in _named(snapshot, name)):
            raise wrong_value(test, test.values[0], "a number")
        if test.op == "null":
            return lambda snapshot: (not _named(snapshot, name)) is not test.negated
        if test.op == "nan":
            return lambda snapshot: any(value != value for value in _named(snapshot, name)) is not test.negated  # noqa: PLR0124
        compared = _comparison(test, values)
        return lambda snapshot: any(compared(value) for value in _named(snapshot, name) if type(value) is kind)

    def _field_test(self, test: NameTest) -> _Holds:
        values, name = self._checked(test), test.name.text
        value_of = _FIELD_VALUES[name] if name != "age" else lambda snapshot: self._now_ns - snapshot.time_ns
        if test.op == "null":
            return lambda snapshot: (value_of(snapshot) in (None, "")) is not test.negated
        if name == "root":
            is_positive = test.op != "!=" and not test.negated
            return lambda snapshot: snapshot.root.startswith(tuple(values)) is is_positive
        compared = _comparison(test, values)
        return lambda snapshot: value_of(snapshot) is not None and compared(value_of(snapshot))

    @staticmethod
    def _checked(test: NameTest) -> list[Any]:
        match test.name.text:
            case "root":
                return [*roots_of(test)]
            case "time":
                check_op(test, BEFORE, "a time")
                return [date_ns_of(test, value) for value in test.values]
            case "age":
                check_op(test, BEFORE, "an age")
                return [int(seconds_of(test, value) * 1e9) for value in test.values]
            case "step":
                check_op(test, (*ORDERED, "null"), "a number")
                return [number_of(test, value) for value in test.values]
            case "ref" | "job" | "mark":
                check_op(test, (*TEXT_OPS, *(("null",) if test.name.text == "mark" else ())), "a text")
                return [*texts_of(test)]
            case _:
                check_op(test, ORDERED, "a number of bytes")
                return [bytes_of(test, value) for value in test.values]

    def _require(self, name: str) -> None:
        known = {key for snapshot in self._snapshots for key in (*snapshot.metrics, *searchable(snapshot))}
        if name in known or not self._snapshots:
            return
        close = similar_names(name, [*_FIELDS, *sorted(known)])
        advice = f"did you mean {' or '.join(close)}?" if close else f"there are {_listed(known)}"
        raise NotFoundError(f"none of these snapshots has a metric or an attribute {name!r}: {advice}", object_id=name)


_FIELD_VALUES: Final[Mapping[str, Callable[[Snapshot], Any]]] = {
    "step": operator.attrgetter("step"),
    "ref": operator.attrgetter("ref"),
    "job": lambda snapshot: job_of(snapshot.ref),
    "root": operator.attrgetter("root"),
    "time": operator.attrgetter("time_ns"),
    "mark": operator.attrgetter("mark"),
    **{name: operator.attrgetter(field) for name, field in _BYTES.items()},
}


def names_in(condition: str | None, sort: str | None) -> tuple[str, ...]:
    """The names in a condition and an order that are no fields, each once."""
    nodes: list[Condition] = [parse_search(condition)] if condition is not None else []
    names = [Name((sort or "").strip('"'), is_metric=False)] if sort is not None else []
    while nodes:
        node = nodes.pop()
        nodes += node.parts if isinstance(node, Joined) else []
        names += [node.name] if isinstance(node, NameTest) else []
    return tuple(sorted({name.text for name in names if name.is_metric or name.text not in (*_FIELDS, *_OF_CATALOG)}))


def _named(snapshot: Snapshot, name: str) -> list[float | str]:
    return [values[name] for values in (snapshot.metrics, searchable(snapshot)) if name in values]


def _comparison(test: NameTest, values: Sequence[Any]) -> Callable[[Any], bool]:
    compare = _COMPARE[test.op]
    others = [_pattern(values[0])] if test.op == "like" else values
    return lambda value: value == value and compare(value, *others) is not test.negated  # noqa: PLR0124 - NaN


def _pattern(like: str) -> "re.Pattern[str]":
    """The pattern of SQL's LIKE, in which a backslash escapes.

    A piece between two ``%`` counts where it is found first, so that the time is linear in the text.
    """
    pieces = [""]
    for escaped, every, one, text in _ESCAPED.findall(like):
        if every:
            pieces.append("")
        else:
            pieces[-1] += "." if one else re.escape(escaped or text)
    first, *others = pieces
    if not others:
        return re.compile(first, re.DOTALL)
    *middle, last = others
    return re.compile(f"{first}{''.join(f'(?>.*?{piece})' for piece in middle)}.*{last}", re.DOTALL)


def _listed(names: Collection[str]) -> str:
    return (", ".join(sorted(names)[:8]) + (", ..." if len(names) > 8 else "")) or "none"

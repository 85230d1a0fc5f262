"""A parsed condition -> SQL. Values are bound, never written into the statement.

Every test is true or false. A missing value or NaN satisfies no comparison, so it satisfies the ``not`` of every comparison.
"""

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

from sqlalchemy import BigInteger, ColumnElement, Double, Select, Table, Text, and_, exists, false, literal, not_, or_, select

from tensorstore_ck.catalog.current_refs import STATES
from tensorstore_ck.catalog.schema import attributes, metrics, pins, snapshots, stores, tags
from tensorstore_ck.common.condition_values import (
    BEFORE,
    ORDERED,
    TEXT_OPS,
    bytes_of,
    check_op,
    date_ns_of,
    named_values_of,
    number_of,
    roots_of,
    seconds_of,
    texts_of,
    wrong_value,
)
from tensorstore_ck.common.conditions import FLIPPED, Condition, Joined, Name, NameTest
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log.field_checks import MARKS

SqlCondition = ColumnElement[bool]
_MAX_INT: Final = (1 << 63) - 1
_CHOICES: Final = {"state": STATES, "mark": MARKS}


class Known(NamedTuple):
    """The facts about a catalog that a query needs before it is built."""

    is_rare: Callable[[Select[Any]], bool] = lambda _: True
    """Whether a statement finds so few snapshots that a lookup by id is faster than a test of each snapshot."""
    tables_of: Callable[[str], Collection[Table]] = lambda _: (metrics, attributes)
    """Which of the tables have a name."""


def to_sql(node: Condition, now_ns: int, known: Known) -> SqlCondition:
    """The rows of `snapshots` for which `node` holds.

    Args:
        node: The tree.
        now_ns: The time from which ages count.
        known: What the catalog has.

    Raises:
        InvalidOptionError: a comparison makes no sense.
    """
    if isinstance(node, Joined):
        parts = [to_sql(part, now_ns, known) for part in node.parts]
        return not_(parts[0]) if node.how == "not" else and_(*parts) if node.how == "and" else or_(*parts)
    if isinstance(node, NameTest):
        return _named(node, known) if is_metric(node.name) else FIELDS[node.name.text](node, now_ns)
    raise TypeError("arithmetic has no SQL")


def names_of(node: Condition) -> list[Name]:
    """The names in a condition, in order, each once."""
    parts = node.parts if isinstance(node, Joined) else ()
    names = [node.name] if isinstance(node, NameTest) else [name for part in parts for name in names_of(part)]
    return list(dict.fromkeys(names))


def is_metric(name: Name) -> bool:
    """Whether it is the name of a metric or an attribute, not of a field."""
    return name.is_metric or name.text not in FIELDS


def has_named(known: Known, table: Table, name: str, *conditions: SqlCondition) -> SqlCondition:
    """The snapshots that have the metric or attribute, with a value for which `conditions` hold."""
    those = select(table.c.snapshot).where(table.c.name == name, *conditions)
    return (
        snapshots.c.id.in_(those) if known.is_rare(those) else exists(those.where(table.c.snapshot == snapshots.c.id).correlate(snapshots))
    )


def is_in_table(table: Table, *conditions: SqlCondition) -> SqlCondition:
    """The snapshots that have a row in a table for which `conditions` hold."""
    other = snapshots.alias()
    same_snapshot = and_(other.c.store_id == table.c.store_id, other.c.ulid == table.c.ulid)
    return snapshots.c.id.in_(select(other.c.id).join(table, same_snapshot).where(*conditions))


def _named(test: NameTest, known: Known) -> SqlCondition:
    name, values, tables = test.name.text, named_values_of(test), known.tables_of(test.name.text)
    if test.op in TEXT_OPS and values and isinstance(values[0], str):
        if attributes not in tables:
            raise wrong_value(test, test.values[0], "a number")
        return has_named(known, attributes, name, _compared(attributes.c.text, test, [literal(value, Text) for value in values]))
    if test.op in ("null", "nan"):
        nan = {metrics: (metrics.c.value.is_(None),), attributes: (attributes.c.value.is_(None), attributes.c.text.is_(None))}
        condition = or_(*(has_named(known, table, name, *(() if test.op == "null" else nan[table])) for table in tables))
        return condition if (test.op == "nan") != test.negated else not_(condition)
    numbers = [literal(value, Double) for value in values]
    return or_(*(has_named(known, table, name, _compared(table.c.value, test, numbers)) for table in tables))


def _step(test: NameTest, _: int) -> SqlCondition:
    if test.op == "null":
        return snapshots.c.step.is_not(None) if test.negated else snapshots.c.step.is_(None)
    check_op(test, (*ORDERED, "null"), "a number")
    return and_(snapshots.c.step.is_not(None), _compared(snapshots.c.step, test, [_whole(number_of(test, value)) for value in test.values]))


def _bytes(column: Any) -> "_Kind":
    def make(test: NameTest, _: int) -> SqlCondition:
        check_op(test, ORDERED, "a number of bytes")
        return _compared(column, test, [_whole(bytes_of(test, value)) for value in test.values])

    return make


def _time(test: NameTest, _: int) -> SqlCondition:
    check_op(test, BEFORE, "a time")
    return _compared(snapshots.c.time_ns, test, [_whole(date_ns_of(test, value)) for value in test.values])


def _age(test: NameTest, now_ns: int) -> SqlCondition:
    check_op(test, BEFORE, "an age")
    born = [now_ns - int(seconds_of(test, value) * 1e9) for value in test.values]
    turned = NameTest(test.name, FLIPPED.get(test.op, test.op), test.values, test.negated)
    return _compared(snapshots.c.time_ns, turned, [_whole(ns) for ns in reversed(born)])


def _text(column: Any) -> "_Kind":
    def make(test: NameTest, _: int) -> SqlCondition:
        is_mark = test.name.text == "mark"
        if test.op == "null" and is_mark:
            is_marked: SqlCondition = column != ""
            return is_marked if test.negated else not_(is_marked)
        check_op(test, ("=", "!=", "in", "like", *(("null",) if is_mark else ())), "a text")
        choices = _CHOICES.get(test.name.text)
        for value in test.values:
            if choices and test.op != "like" and value.text not in choices:
                known = ", ".join(repr(choice) for choice in choices)
                raise InvalidOptionError(f"there is no {test.name.text} {value.text!r}: use one of {known}", object_id=value.text)
        return _compared(column, test, [literal(text, Text) for text in texts_of(test)])

    return make


def _store(test: NameTest, now_ns: int) -> SqlCondition:
    return snapshots.c.store_id.in_(select(stores.c.store_id).where(_text(stores.c.url)(test, now_ns)))


def _root(test: NameTest, _: int) -> SqlCondition:
    # g sorts after all hex digits
    begins = [and_(snapshots.c.root >= digits, snapshots.c.root < digits + "g") for digits in roots_of(test)]
    return not_(or_(*begins)) if test.negated or test.op == "!=" else or_(*begins)


def _tag(test: NameTest, _: int) -> SqlCondition:
    """True if one of the snapshot's tags satisfies the test; ``!=`` and ``not``: if none does."""
    check_op(test, ("=", "!=", "in", "like", "null"), "the name of a tag")
    positive = NameTest(test.name, "=" if test.op == "!=" else test.op, test.values)
    is_named = () if test.op == "null" else (_compared(tags.c.name, positive, [literal(text, Text) for text in texts_of(test)]),)
    condition = is_in_table(tags, *is_named)
    return not_(condition) if (test.op == "!=") or (test.op == "null") != test.negated else condition


def _pinned(test: NameTest, _: int) -> SqlCondition:
    condition = is_in_table(pins)
    if test.op == "flag":
        return condition
    check_op(test, ("=", "!="), "true or false")
    if test.values[0].kind != "flag":
        raise InvalidOptionError(f"pinned is true or false, not {test.values[0].text!r}", object_id="pinned")
    return condition if (test.values[0].text.lower() == "true") == (test.op == "=") else not_(condition)


_Kind = Callable[[NameTest, int], SqlCondition]
FIELDS: Final[dict[str, _Kind]] = {
    "step": _step,
    "job": _text(snapshots.c.job),
    "ref": _text(snapshots.c.ref),
    "store": _store,
    "root": _root,
    "time": _time,
    "age": _age,
    "size": _bytes(snapshots.c.logical_bytes),
    "logical_bytes": _bytes(snapshots.c.logical_bytes),
    "new_bytes": _bytes(snapshots.c.new_bytes),
    "mark": _text(snapshots.c.mark),
    "state": _text(snapshots.c.state),
    "tag": _tag,
    "pinned": _pinned,
    "actor": _text(snapshots.c.actor),
}
"""Any other name is a metric or an attribute."""


_COMPARISONS: Final[Mapping[str, Callable[[Any, Any], Any]]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _compared(column: Any, test: NameTest, values: Sequence[Any]) -> SqlCondition:
    match test.op:
        case "=" | "!=" | "<" | "<=" | ">" | ">=" as op:
            condition: SqlCondition = _COMPARISONS[op](column, values[0])
        case "in":
            condition = column.in_(values)
        case "between":
            condition = and_(column >= values[0], column <= values[1])
        case "like":
            # as an expression, so that SQLite keeps to the index by time: with the column's own index it sorts all rows found
            condition = (column + "").like(values[0], escape="\\")
        case _:
            return false()
    return not_(condition) if test.negated else condition


def _whole(number: float) -> Any:
    """Binds an integer as an integer, and a larger or fractional number as a float."""
    if isinstance(number, int) and abs(number) <= _MAX_INT:
        return literal(number, BigInteger)
    return literal(float(number), Double)

"""Conditions that search snapshots: their size, which tests a field takes, and the values to compare it with. For SQL and in memory."""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Final

from tensorstore_ck.common.conditions import Condition, NameTest, Value, parse
from tensorstore_ck.common.units import parse_bytes, parse_seconds
from tensorstore_ck.errors import InvalidOptionError

MAX_CHARS: Final = 10_000
MAX_DEPTH: Final = 40
MAX_TESTS: Final = 200
"""SQLite takes no expression that is 1,000 deep."""
ORDERED: Final = ("=", "!=", "<", "<=", ">", ">=", "in", "between")
BEFORE: Final = ("<", "<=", ">", ">=", "between")
TEXT_OPS: Final = ("=", "!=", "in", "like")
_ROOT: Final = re.compile(r"[0-9a-f]{1,64}")


def parse_search(text: object) -> Condition:
    """The tree of a condition that is short and shallow enough for a database.

    Raises:
        InvalidOptionError: it is not a condition, or it is too large.
    """
    node = parse(text, max_chars=MAX_CHARS)
    if node.depth > MAX_DEPTH or node.tests > MAX_TESTS:
        text = f"the condition is too long or too deep: at most {MAX_TESTS} tests, nested {MAX_DEPTH} deep"
        raise InvalidOptionError(text, object_id="condition")
    return node


def named_values_of(test: NameTest) -> list[float] | list[str]:
    """The values to compare a metric or an attribute with: all numbers (a flag is 1.0 or 0.0), or all texts."""
    if test.op == "like" or (test.values and test.values[0].kind == "text"):
        check_op(test, TEXT_OPS, "a text here")
        return texts_of(test)
    check_op(test, (*ORDERED, "null", "nan"), "a metric or an attribute, here a number")
    is_flag = test.op in ("=", "!=") and test.values[0].kind == "flag"
    return [float(value.text.lower() == "true") if is_flag else number_of(test, value) for value in test.values]


def roots_of(test: NameTest) -> list[str]:
    """The first digits of roots."""
    check_op(test, ("=", "!=", "in"), "a root")
    begins = [value.text.lower() for value in test.values]
    for digits, value in zip(begins, test.values, strict=True):
        if not _ROOT.fullmatch(digits):
            text = f"root must be compared with the first digits of one, such as '9f86d081', not {value.text!r}"
            raise InvalidOptionError(text, object_id="root")
    return begins


def check_op(test: NameTest, ops: Sequence[str], what: str) -> None:
    """Raises `InvalidOptionError` if the operator is none of `ops`; `what`: what the field is."""
    if test.op not in ops:
        named = {"null": "is null", "nan": "is nan"}
        known = ", ".join(named.get(op, op) for op in ops)
        used = "nothing" if test.op == "flag" else repr(named.get(test.op, test.op))
        raise InvalidOptionError(f"{test.name.text} is {what}: test it with {known}, not with {used}", object_id=test.name.text)


def wrong_value(test: NameTest, value: Value, wanted: str) -> InvalidOptionError:
    """The error that `test` compares with a value of the wrong kind."""
    return InvalidOptionError(f"{test.name.text} must be compared with {wanted}, not with {value.text!r}", object_id=test.name.text)


def number_of(test: NameTest, value: Value) -> float:
    """The number of a value."""
    if value.kind != "number":
        raise wrong_value(test, value, "a number")
    return value.number


def bytes_of(test: NameTest, value: Value) -> float:
    """The number of bytes of a value."""
    if value.kind == "number":
        return number_of(test, value)
    try:
        return parse_bytes(value.text if value.kind != "flag" else "", "size")
    except (InvalidOptionError, OverflowError):
        raise wrong_value(test, value, "a size like 500MB, 10GB or 1.5GiB") from None


def seconds_of(test: NameTest, value: Value) -> float:
    """The seconds of a duration."""
    try:
        return parse_seconds(value.text if value.kind in ("quantity", "text") else None, "age")
    except InvalidOptionError:
        raise wrong_value(test, value, "a duration like 90s, 10m, 12h or 7d") from None


def date_ns_of(test: NameTest, value: Value) -> int:
    """Nanoseconds since 1970 of a date, which is in UTC without a time zone."""
    try:
        date = datetime.fromisoformat(value.text if value.kind == "text" else "")
        aware = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        return int(aware.timestamp()) * 1_000_000_000 + aware.microsecond * 1000
    except (ValueError, OverflowError, OSError):
        raise wrong_value(test, value, "a date like '2026-01-31' or '2026-01-31T12:00:00Z'") from None


def texts_of(test: NameTest) -> list[str]:
    """The texts that a test compares with."""
    for value in test.values:
        if value.kind != "text":
            raise wrong_value(test, value, "a text in single quotes")
        if test.op == "like" and len(value.text) - len(value.text.rstrip("\\")) & 1:
            raise InvalidOptionError(rf"{value.text!r} ends with a backslash, which escapes what follows: write \\", object_id="like")
    return [value.text for value in test.values]

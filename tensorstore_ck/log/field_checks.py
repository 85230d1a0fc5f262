"""Checks of the fields of operations and of rows of the ref table, and their limits."""

from collections.abc import Callable
from typing import Final

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES

MAX_METRICS: Final = 1024
MAX_METRIC_NAME_CHARS: Final = 256
MAX_REASON_CHARS: Final = 4096
MAX_OP_NAME_CHARS: Final = 64
MAX_OWNER_BYTES: Final = 256
MAX_RULES: Final = 64
MAX_RULE_ITEMS: Final = 1000
MAX_URL_CHARS: Final = 1024
MARKS: Final = ("bad", "damaged", "drift", "")

Check = Callable[[object], bool]


def _bytes(length: int) -> Check:
    return lambda value: type(value) is bytes and len(value) == length


def _integer(low: int) -> Check:
    return lambda value: type(value) is int and low <= value < 1 << 63


def or_nil(check: Check) -> Check:
    """A check that also accepts nil."""
    return lambda value: value is None or check(value)


def _is_metrics(value: object) -> bool:
    return (
        type(value) is dict
        and len(value) <= MAX_METRICS
        and all(type(name) is str and len(name) <= MAX_METRIC_NAME_CHARS and type(number) is float for name, number in value.items())
    )


def _is_reason(value: object) -> bool:
    return type(value) is str and len(value) <= MAX_REASON_CHARS


def _is_mark(value: object) -> bool:
    return type(value) is str and value in MARKS


def _is_owner(value: object) -> bool:
    return type(value) is str and 0 < len(value.encode("utf-8", "replace")) <= MAX_OWNER_BYTES and "\0" not in value


def _is_url(value: object) -> bool:
    return type(value) is str and 0 < len(value) <= MAX_URL_CHARS and value.isprintable()


def _is_rules(value: object) -> bool:
    """Whether a policy may have these rules; `retention.policy` knows their meaning."""
    return (
        type(value) is dict and 0 < len(value) <= MAX_RULES and all(type(name) is str and _is_rule(rule, 3) for name, rule in value.items())
    )


def _is_rule(value: object, depth: int) -> bool:
    if type(value) is list:
        return depth > 0 and len(value) <= MAX_RULE_ITEMS and all(_is_rule(each, depth - 1) for each in value)
    return type(value) in (int, float, bool) or (type(value) is str and len(value) <= MAX_METRIC_NAME_CHARS)


is_digest: Final = _bytes(DIGEST_BYTES)
is_ulid: Final = _bytes(ULID_BYTES)
is_count: Final = _integer(0)
is_step: Final = or_nil(_integer(-(1 << 63)))
is_parent: Final = or_nil(is_digest)
is_metrics: Final = _is_metrics
is_mark: Final = _is_mark
is_reason: Final = _is_reason
is_owner: Final = _is_owner
is_rules: Final = _is_rules
is_url: Final = _is_url
is_date: Final = or_nil(is_count)

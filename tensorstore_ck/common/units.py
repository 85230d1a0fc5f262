"""Times, sizes and lists as people write and read them.

Times: ``90s``, ``10m``, ``1h``, ``30d``, ``2w``. Sizes: ``50GB`` is 50 * 10**9, ``1.5GiB`` is 1.5 * 2**30; 1536 is written ``1.5 KiB``.
"""

import math
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

from tensorstore_ck.errors import InvalidOptionError

MAX_SECONDS: Final = 1e11
"""More than 3,000 years."""
_TIME_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")
_SIZE_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp])(i?))?b?", re.IGNORECASE)


def parse_seconds(value: object, what: str) -> float:
    """The seconds of a text, a number of seconds or a `timedelta`. Raises `InvalidOptionError` if it is not a duration."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        value = float(match[1]) * _TIME_UNITS[match[2]]
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS:
        return float(value)
    raise InvalidOptionError(f"{what} must be a duration like 90s, 10m, 1h or 30d, not {value!r}", object_id=what)


def parse_bytes(value: object, what: str) -> int:
    """The bytes of a text or a number of bytes. Raises `InvalidOptionError` if it is not a size."""
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())) is not None:
        size = float(match[1]) * (1024 if match[3] else 1000) ** (" kmgtp".index((match[2] or " ").lower()))
        value = int(size) if size < math.inf else value
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise InvalidOptionError(f"{what} must be a size like 500MB, 10GB or 1.5GiB, not {value!r}", object_id=what)


def parse_rate(value: float | str) -> float:
    """The bytes per second that ``100MB``, ``1.5GiB/s`` or a number stands for. Raises `InvalidOptionError` if it stands for none."""
    rate = parse_bytes(value.strip().removesuffix("/s"), "rate limit") if isinstance(value, str) else value
    if not 0 < rate < math.inf:
        raise InvalidOptionError(f"a rate limit must be more than 0 bytes per second, not {value}", object_id="rate limit")
    return rate


def human_bytes(count: int) -> str:
    """1536 -> ``1.5 KiB``."""
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _SIZE_UNITS:
        size /= 1024
        if abs(size) < 1023.95 or unit == _SIZE_UNITS[-1]:
            break
    return f"{size:.1f} {unit}"


def typed_bytes(count: int) -> str:
    """A size as somebody types it: 2 * 10**12 -> ``2 TB``, 1.5 * 2**30 -> ``1.5 GiB``; else as `human_bytes`."""
    units = [(base**power, f"{letter}{'i' * (base == 1024)}B") for power, letter in enumerate("KMGTPE", 1) for base in (1000, 1024)]
    for size, unit in reversed(units):
        number = round(count / size, 3)
        if 1 <= number < 10_000 and number * size == count:
            return f"{number:g} {unit}"
    return human_bytes(count)


def human_seconds(seconds: float) -> str:
    """0.0251 -> ``0.0251 s``, 600 -> ``10 min``; hours from 2 hours on, days from 2 days on."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.1f} d"


def iso_time(time_ns: int) -> str:
    """Nanoseconds since 1970 -> ``2026-01-31T12:00:00Z``."""
    try:
        return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (OverflowError, OSError, ValueError):  # the clock was wrong
        return f"{time_ns} ns"


def listed(items: Sequence[object], most: int = 8) -> str:
    """The first items, and how many more there are."""
    return ", ".join(map(str, items[:most])) + (f" and {len(items) - most} more" if len(items) > most else "")

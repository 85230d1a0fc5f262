"""Bytes, ages and times as people read them."""

from datetime import UTC, datetime
from typing import Final

_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))


def time_text(time_ns: int) -> str:
    """``2026-01-31 12:00:00``, in UTC."""
    try:
        return datetime.fromtimestamp(time_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OverflowError, OSError, ValueError):  # the clock was wrong
        return f"{time_ns} ns"


def duration_text(duration_ns: int) -> str:
    """``12 s``, ``5 min``, ``3 h``, ``2 d``; of a time in the future, ``0 s``."""
    seconds = max(0, duration_ns) // 1_000_000_000
    size, unit = next((each for each in _UNITS if seconds >= 2 * each[0]), _UNITS[-1])
    return f"{seconds // size:,} {unit}"

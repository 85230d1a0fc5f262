"""Bytes, ages, times and numbers as people read them."""

import math
import re
from typing import Final

from markupsafe import Markup, escape

from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.common.units import iso_time

_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
NONE: Final = "\N{EN DASH}"


def time_text(time_ns: int | None) -> str:
    """``2026-01-31 12:00:00``, in UTC; a dash for None."""
    return NONE if time_ns is None else iso_time(time_ns).replace("T", " ").removesuffix("Z")


def duration_text(duration_ns: int) -> str:
    """``12 s``, ``5 min``, ``3 h``, ``2 d``; of a time in the future, ``0 s``."""
    seconds = max(0, duration_ns) // 1_000_000_000
    size, unit = next((item for item in _UNITS if seconds >= 2 * item[0]), _UNITS[-1])
    return f"{seconds // size:,} {unit}"


def count_text(count: int | None) -> str:
    """``1,234``; a dash for None."""
    return NONE if count is None else f"{count:,}"


def number_text(number: float | None) -> str:
    """Six significant digits; a dash for None."""
    if number is None:
        return NONE
    return f"{number:.6g}" if math.isfinite(number) else str(number)


def root_text(root: str) -> str:
    """The digits of a root that are enough to find it again."""
    return root[:SHOWN_ROOT_DIGITS]


def commands_html(text: str) -> Markup:
    """A text with commands in backticks, which become code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - it is escaped

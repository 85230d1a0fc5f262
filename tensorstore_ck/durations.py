"""Lengths of time as people write them: ``90s``, ``10m``, ``1h``, ``30d``, ``2w``."""

import re
from datetime import timedelta
from typing import Final

from tensorstore_ck.errors import InvalidOptionError

MAX_SECONDS: Final = 1e11
"""More than 3,000 years."""
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhdw])")


def parse_seconds(value: object, what: str) -> float:
    """The seconds that a text, a number of seconds or a `timedelta` stands for.

    Raises:
        InvalidOptionError: it stands for none.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        value = float(match[1]) * _UNITS[match[2]]
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MAX_SECONDS:
        return float(value)
    raise InvalidOptionError(f"{what} must be a length of time like 90s, 10m, 1h or 30d, not {value!r}", object_id=what)

"""Numbers of bytes as people write and read them: ``50GB`` is 50 * 10**9, ``1.5GiB`` is 1.5 * 2**30, and 1536 is said ``1.5 KiB``."""

import re
from typing import Final

from tensorstore_ck.errors import InvalidOptionError

_UNITS: Final = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtp])(i?))?b?", re.IGNORECASE)


def parse_bytes(value: object, what: str) -> int:
    """The bytes that a text or a number of bytes stands for.

    Raises:
        InvalidOptionError: it stands for none.
    """
    if isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())) is not None:
        return int(float(match[1]) * (1024 if match[3] else 1000) ** (" kmgtp".index((match[2] or " ").lower())))
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise InvalidOptionError(f"{what} must be a size like 500MB, 10GB or 1.5GiB, not {value!r}", object_id=what)


def human_bytes(count: int) -> str:
    """1536 -> ``1.5 KiB``."""
    if abs(count) < 1024:
        return f"{count} B"
    size = float(count)
    for unit in _UNITS:
        size /= 1024
        if abs(size) < 1023.95 or unit == _UNITS[-1]:
            break
    return f"{size:.1f} {unit}"

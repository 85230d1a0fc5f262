"""Attributes of a snapshot: the numbers and short texts that conditions compare, besides metrics. Pure.

They are copies of what the caller passes and of the scalars in `metadata`, kept in the log entry, so that a search reads no records.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, TypeGuard

from tensorstore_ck.errors import InvalidOptionError

MAX_ATTRIBUTES: Final = 64
MAX_NAME_CHARS: Final = 128
MAX_TEXT_CHARS: Final = 256

Attributes = Mapping[str, float | str]


def are_attributes(value: object) -> TypeGuard[dict[str, float | str]]:
    """Whether a record or log entry may have these attributes."""
    return type(value) is dict and len(value) <= MAX_ATTRIBUTES and all(_is_attribute(name, item) for name, item in value.items())


def attributes_of(given: object, metadata: Mapping[str, object]) -> dict[str, float | str]:
    """The attributes of a save: those that the caller passes, then the scalars of its metadata by path (``config.dropout``), outer first.

    Flags become 1.0 and 0.0. Leaves out lists and what is beyond the limits: `metadata` itself has no such limits.

    Raises:
        InvalidOptionError: `given` is no dict of numbers and texts by name, or exceeds the limits.
    """
    found: dict[str, float | str] = {}
    waiting = deque([("", given or {}), ("", metadata)])
    while waiting and len(found) < MAX_ATTRIBUTES:
        prefix, values = waiting.popleft()
        if not isinstance(values, Mapping) or (values is given and len(values) > MAX_ATTRIBUTES):
            raise InvalidOptionError(
                f"attributes must be a dict of at most {MAX_ATTRIBUTES} numbers and texts by name", object_id="attributes"
            )
        for key, value in values.items():
            name, scalar = f"{prefix}{key}", _scalar(value)
            if isinstance(value, Mapping) and values is not given:
                waiting.append((f"{name}.", value))
            elif scalar is not None and _is_attribute(name, scalar):
                if len(found) < MAX_ATTRIBUTES:
                    found.setdefault(name, scalar)
            elif values is given:
                raise InvalidOptionError(
                    f"attribute {key!r} must be a number or a text of at most {MAX_TEXT_CHARS} characters, under a name of 1 to "
                    f"{MAX_NAME_CHARS} characters, not {value!r:.40}",
                    object_id=f"attributes.{key!s:.40}",
                )
    return found


def _scalar(value: object) -> float | str | None:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float) or (isinstance(value, int) and abs(value) < 1 << 64):
        return float(value)
    return None


def _is_attribute(name: object, value: object) -> TypeGuard[float | str]:
    if type(name) is not str or not 0 < len(name) <= MAX_NAME_CHARS or not _is_text(name):
        return False
    return type(value) is float or (type(value) is str and len(value) <= MAX_TEXT_CHARS and _is_text(value))


def _is_text(text: str) -> bool:
    return "\0" not in text and (text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text))

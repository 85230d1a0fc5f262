"""`FoundState`: what the reader of each format returns."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class FoundState(NamedTuple):
    """The state of a foreign checkpoint, with placeholders."""

    format: str
    state: Any
    metadata: Mapping[str, object]
    unknown: Mapping[str, str]
    """Names in its pickles that are not allowed -> the file."""
    step: int | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    """Files next to it that are not part of it, and why."""
    files: tuple[str, ...] = ()
    """The files that its index names."""
    missing: tuple[str, ...] = ()
    """Files that belong to it, and are not there."""

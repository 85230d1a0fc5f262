"""Importers of other packages, found by the entry point ``tensorstore_ck.importers``. CONTRIBUTING.md has a template.

An importer is a function of a path. It returns None for what is not its format, and else the state: it is asked before the formats here.
It runs with the rights of the user, who has installed it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Final

from tensorstore_ck.errors import StoreError, UnsupportedValueError

GROUP: Final = "tensorstore_ck.importers"


@dataclass(frozen=True, slots=True)
class ForeignCheckpoint:
    """The result of another package's importer for a path."""

    state: Any
    """Any nesting of dicts, lists and tuples with tensors, numpy arrays and plain values."""
    step: int | None = None
    metadata: Mapping[str, object] = field(default_factory=dict)
    """Noted in the snapshot's metadata."""


def read_by_outside_importer(path: str) -> tuple[str, ForeignCheckpoint] | None:
    """The name of the first importer that knows the format at `path`, and what it read; None: no importer does.

    Raises:
        UnsupportedValueError: an importer failed, or returned something else.
    """
    for point in sorted(entry_points(group=GROUP)):
        try:
            found: object = point.load()(path)
        except StoreError:
            raise
        except Exception as exc:  # BLE: code of another package raises anything
            raise UnsupportedValueError(
                f"the importer {point.name!r} ({point.value}) failed on {path}: {type(exc).__name__}: {exc}. Report it to its package, or "
                "uninstall that",
                object_id=point.name,
            ) from exc
        if isinstance(found, ForeignCheckpoint):
            return point.name, found
        if found is not None:
            raise UnsupportedValueError(
                f"the importer {point.name!r} ({point.value}) returned a {type(found).__name__}, not a ForeignCheckpoint or None",
                object_id=point.name,
            )
    return None

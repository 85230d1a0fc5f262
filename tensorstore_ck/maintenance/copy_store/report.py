"""The report of a copy."""

from collections.abc import Callable
from dataclasses import dataclass

from tensorstore_ck.errors import StoreError

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes) of the content of the snapshots to copy."""


@dataclass(frozen=True, slots=True)
class CopiedRef:
    """The result for one ref."""

    name: str
    kind: str
    """``branch`` or ``tag``."""
    outcome: str
    """``copied``: now equal to the source; ``there``: it was equal; ``ahead``: the target has more; ``failed``; ``behind``: the source's
    head was left out, and the target is at the last copied snapshot before it, if any."""
    root: str | None
    """The target's root of the ref now."""
    snapshots: int
    """Snapshots that were copied for it."""
    error: StoreError | None = None
    """Why it failed or is behind; snapshots that were copied before the error stay."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """The result of a copy."""

    refs: tuple[CopiedRef, ...]
    snapshots: int
    """Snapshots that were copied."""
    snapshots_there: int
    """Snapshots of the chosen refs that the target had already."""
    blocks: int
    """Transferred blocks."""
    blocks_there: int
    """Blocks of copied snapshots that the target had already, or that occur repeatedly."""
    read_bytes: int
    """Bytes of blocks read from the source."""
    written_bytes: int
    """Bytes of packs, parts and records written to the target."""
    warnings: tuple[str, ...]
    """The parts that were left out, and why."""

    @property
    def ok(self) -> bool:
        """Whether every ref is equal to the source or ahead. Earlier snapshots may have been left out: see `warnings`."""
        return not any(ref.error or ref.outcome == "behind" for ref in self.refs)

"""What a copy did."""

from collections.abc import Callable
from dataclasses import dataclass

from tensorstore_ck.errors import StoreError

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all), of the content of the snapshots that have to be copied."""


@dataclass(frozen=True, slots=True)
class CopiedRef:
    """What became of one ref."""

    name: str
    kind: str
    """``branch`` or ``tag``."""
    outcome: str
    """``copied``: it is now where the source has it; ``there``: it was; ``ahead``: the target has more; ``failed``; ``behind``: the
    snapshot where the source has it was left out, and the target is at the one before it that was copied, if any."""
    root: str | None
    """Where the target has it now."""
    snapshots: int
    """Snapshots that were copied for it."""
    error: StoreError | None = None
    """Why it failed, or is behind; snapshots before the trouble were copied, and stay."""


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a copy did."""

    refs: tuple[CopiedRef, ...]
    snapshots: int
    """Snapshots that were copied."""
    snapshots_there: int
    """Snapshots of the chosen refs that the target had already."""
    blocks: int
    """Blocks that travelled."""
    blocks_there: int
    """Blocks of copied snapshots that the target had already, or that occur in them again."""
    read_bytes: int
    """Bytes of blocks read from the source."""
    written_bytes: int
    """Bytes of packs, parts and records written to the target."""
    warnings: tuple[str, ...]
    """What was left out, and why."""

    @property
    def ok(self) -> bool:
        """Whether every ref is where the source has it, or further. Snapshots before that may have been left out: see `warnings`."""
        return not any(ref.error or ref.outcome == "behind" for ref in self.refs)

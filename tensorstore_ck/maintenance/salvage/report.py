"""The report of salvage."""

from dataclasses import dataclass

from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.log import SnapshotRow


@dataclass(frozen=True, slots=True)
class Salvaged:
    """One snapshot in the report."""

    id: str
    ref: str
    step: int | None
    root: str
    note: str
    """How it was found, or why it is not in the new log."""


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """The result of a salvage; with ``dry_run``, the result that it would have."""

    log: str
    """Prefix of the new log; empty if the old log is intact, and nothing was done."""
    problems: tuple[str, ...]
    """The damage that was found."""
    branches: tuple[str, ...]
    tags: tuple[str, ...]
    kept: int
    """Held snapshots in the new log."""
    recovered: tuple[Salvaged, ...]
    """The held snapshots that no surviving entry or checkpoint names (perhaps also one whose save was interrupted just before its end), and
    those that nothing holds according to the surviving entries: `undo` brings them back until gc frees them."""
    lost: tuple[Salvaged, ...]
    """Damaged snapshots, which are not in the new log."""
    left_out: tuple[Salvaged, ...]
    """Intact, but never published: interrupted and aborted saves, and those that lost a race."""


def salvaged(info: SnapshotRow, note: str) -> Salvaged:
    """The report's row of a snapshot."""
    return Salvaged(id=ulid_text(info.ulid), ref=info.ref, step=info.step, root=info.root.hex(), note=note)

"""What salvage says that it did."""

from dataclasses import dataclass

from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.log import SnapshotInfo


@dataclass(frozen=True, slots=True)
class Salvaged:
    """One snapshot in the report."""

    id: str
    ref: str
    step: int | None
    root: str
    note: str
    """Where it was found, or why it is not in the new log."""


@dataclass(frozen=True, slots=True)
class SalvageReport:
    """What salvage did; with ``dry_run``, would do."""

    log: str
    """Prefix of the new log; empty when the old one is intact, and nothing was done."""
    problems: tuple[str, ...]
    """What was wrong."""
    branches: tuple[str, ...]
    tags: tuple[str, ...]
    kept: int
    """Snapshots in the new log that something holds."""
    recovered: tuple[Salvaged, ...]
    """Those of them that no surviving entry or checkpoint names; one whose save was interrupted just before its end may be among them.
    And those that nothing holds any more as far as the entries tell that are left: `undo` brings them back until gc frees them."""
    lost: tuple[Salvaged, ...]
    """Damaged: not in the new log."""
    left_out: tuple[Salvaged, ...]
    """Intact, but never published: saves that were interrupted, lost a race or were aborted."""


def salvaged(info: SnapshotInfo, note: str) -> Salvaged:
    """A snapshot, as the report has it."""
    return Salvaged(ulid_text(info.ulid), info.ref, info.step, info.root.hex(), note)

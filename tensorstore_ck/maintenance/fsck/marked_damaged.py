"""Snapshots that repair marked as damaged, on any host: how the store remembers damage that only reading data finds."""

from collections.abc import Collection, Iterator

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.format.record import record_name
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.maintenance.fsck.check_snapshot import describe_hit, placed_parts
from tensorstore_ck.maintenance.fsck.findings import DAMAGED, Findings, Severity
from tensorstore_ck.maintenance.fsck.repairable import other_store_advice, repair_command


def packs_of_marked(engine: Engine) -> set[Ulid]:
    """The packs of the snapshots that are marked as damaged."""
    return {pack for info in _marked_damaged(engine) for pack in packs_of(engine, info)}


def packs_of(engine: Engine, info: SnapshotInfo) -> set[Ulid]:
    """The packs of a snapshot, as far as its parts can be read."""
    return {pack for _, locations in placed_parts(engine, info) for pack in locations.packs}


def check_marks(engine: Engine, findings: Findings, *, damaged: Collection[Ulid], read: Collection[Ulid]) -> None:
    """Adds findings for marked snapshots: damaged, unless this check read all their data.

    `engine` is at the log that was checked. `damaged`: snapshots that this check found damaged. `read`: packs whose blocks it read all.
    """
    for info in _marked_damaged(engine):
        if info.ulid in damaged:
            continue
        is_whole = packs_of(engine, info) <= set(read)
        if is_whole:
            message = f"it is marked as damaged ({info.reason}), and is intact now: {repair_command(reads_data=True)} removes the mark"
        else:
            message = (
                f"it is marked as damaged ({info.reason}), and this check did not read all its data: {other_store_advice(reads_data=True)}"
            )
        address = info.ref if info.step is None else f"{info.ref}@{info.step}"
        severity: Severity = "notice" if is_whole else "error"
        hit = describe_hit([address], info, ())
        findings.add("marked_damaged", record_name(info.ulid), message, hit=hit, severity=severity, repairable=is_whole)


def _marked_damaged(engine: Engine) -> Iterator[SnapshotInfo]:
    return (info for info in engine.log.view().snapshots() if info.mark == DAMAGED)

"""The last two phases of a save: `write` makes the part of a process alone durable, and `commit` ends every save. Knows no torch.

The ranks of a group write their parts by `session/group/rank_save.py`, and rank 0 commits for all.
"""

from collections.abc import Sequence

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.compare_parent import ParentComparison
from tensorstore_ck.engine.write.destination import Destination, StoreDestination
from tensorstore_ck.engine.write.part_writer import write_part
from tensorstore_ck.engine.write.rank_parts import RankParts, checked_parts, record_of
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.suspicious_save import SaveFindings, merged
from tensorstore_ck.engine.write.write_plan import slot_of_one
from tensorstore_ck.errors import UndecidedError
from tensorstore_ck.log import RefTable, SnapshotInfo


def write(
    destination: Destination, captured: CapturedState, request: SaveRequest, meter: SaveMeter, view: RefTable
) -> tuple[RankParts, SaveFindings]:
    """Writes the only part of a snapshot, and compares it with the snapshot before; the head of `view` is its anchor.

    Raises:
        SnapshotExpiredError: gc freed something that it relies on.
    """
    engine, is_offline = destination.engine, destination.is_offline
    destination.admit(request, view)
    head, known = view.head(), destination.known(request, view, 0, 1)
    anchor = head.n if head is not None else 0
    written = write_part(
        engine,
        captured,
        known,
        anchor=anchor,
        slot=slot_of_one(captured),
        coding=request.coding,
        meter=meter,
        sampling=request.sampling,
    )
    if is_offline:  # a comparison might have to read from the store
        finiteness = written.tensors.sample.finiteness
        findings = SaveFindings(elements=finiteness.elements, non_finite=finiteness.non_finite)
    else:
        findings = ParentComparison(engine=engine, view=view, written=written, captured=captured, claim=request.claim).examine()
    destination.wrote(request, [written])
    with meter.timed("commit"):
        is_published_later = destination.is_staging and not is_offline
        at = destination.ask(engine.log.newest_view) if is_published_later else view
        return checked_parts(engine, [written], anchor, at), findings


def commit(
    destination: Destination,
    request: SaveRequest,
    reports: Sequence[RankParts],
    findings: Sequence[SaveFindings],
    *,
    logical_bytes: int,
    meter: SaveMeter,
    view: RefTable,
    txn: Ulid | None = None,
    streams: str = "",
    mark: tuple[str, str] | None = None,
) -> SnapshotInfo:
    """Judges the findings of all ranks, and commits their parts: the record, then one log entry.

    Args:
        destination: Where the parts are.
        request: The ref, the step and the other options, as of one log entry.
        reports: The parts of each rank, in the order of ranks.
        findings: The findings of each rank.
        logical_bytes: The bytes of the whole state.
        meter: Counts the progress.
        view: The log at an entry that has the snapshot before.
        txn: The snapshot's ULID; None: a new one.
        streams: See `record_of`.
        mark: A mark for the snapshot, and the reason.

    Raises:
        SuspiciousSaveError: the content contradicts the step; nothing is published.
        ConflictError: the ref is elsewhere; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine = destination.engine
    request = request.judged(engine, view, merged(findings))
    with meter.timed("commit"):
        record = record_of(engine, request, reports, logical_bytes=logical_bytes, streams=streams)
        txn = txn or destination.txn or engine.put_id()
        try:
            return destination.commit(request, record, reports, txn=txn, mark=mark, at=view)
        except UndecidedError as exc:
            exc.txn = txn
            raise


def save_captured(engine: Engine, captured: CapturedState, request: SaveRequest, meter: SaveMeter | None = None) -> SnapshotInfo:
    """Saves a state in the store; returns once it is durable and published. The caller has followed the log.

    `meter` counts the progress; an error that it raises gives the save up.

    Raises:
        ConflictError: the ref is not where it was expected; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine.require_writable()
    with StoreDestination(engine) as destination:
        return write_and_commit(destination, captured=captured, request=request, meter=meter or SaveMeter(), view=engine.log.view())


def write_and_commit(
    destination: Destination, captured: CapturedState, request: SaveRequest, meter: SaveMeter, view: RefTable
) -> SnapshotInfo:
    """Both phases for a process alone, first as of `view`: see `Destination.repeat`."""
    views = iter((view,))

    def attempt() -> SnapshotInfo:
        at = next(views, None) or destination.engine.log.view()
        report, findings = write(destination, captured=captured, request=request, meter=meter, view=at)
        return commit(destination, request, [report], [findings], logical_bytes=captured.logical_bytes, meter=meter, view=at)

    info = destination.repeat(attempt)
    destination.keep(info)
    return info

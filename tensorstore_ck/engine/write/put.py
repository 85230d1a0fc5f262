"""Puts one snapshot of one process. Knows no torch: it takes a state that was taken apart."""

from tensorstore_ck.common.put_progress import PutMeter
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import slot_of_one, write_part
from tensorstore_ck.engine.write.publish import retry_expired
from tensorstore_ck.engine.write.rank_parts import checked_parts, publish_parts, record_of
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.errors import UndecidedError
from tensorstore_ck.log import SnapshotInfo


def put(engine: Engine, captured: CapturedState, request: PutRequest, meter: PutMeter | None = None) -> SnapshotInfo:
    """Stores a state and moves the ref to it; returns once both are durable. The caller has synced the log.

    `meter` sees how it goes; what it raises gives the save up.

    Raises:
        ConflictError: the ref is not where it was expected; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine.require_writable()
    return retry_expired(lambda: _try_put(engine, captured, request, meter or PutMeter()), engine.log.sync)


def _try_put(engine: Engine, captured: CapturedState, request: PutRequest, meter: PutMeter) -> SnapshotInfo:
    head = engine.log.view().head()
    known, anchor = DedupIndex(engine, request.nearest), head.n if head else 0
    slot, coding, sampling = slot_of_one(captured), request.coding, request.sampling
    written = write_part(engine, captured, known, anchor=anchor, seat=slot, coding=coding, meter=meter, sampling=sampling)
    request = request.judged(engine, request.examine(engine, written, captured))
    with meter.timed("commit"):
        parts = [checked_parts(engine, [written], anchor, sync=False)]
        record, txn = record_of(engine, request, parts, logical_bytes=captured.logical_bytes), engine.put_id()
        try:
            info = publish_parts(engine, request, record, parts, txn=txn)
        except UndecidedError as exc:
            exc.txn = txn
            raise
    engine.note_published()
    engine.keep_part(written.ulid, written.part)
    engine.index.add(written.added.items(), published_at=info.n)
    return info

"""The last step of a put of many ranks: one process commits for all what each has written, and has checked at its own head.

What it handles is a small record of each rank. Knows neither how the ranks talk to each other nor what they hold.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.part_writer import WrittenPart
from tensorstore_ck.engine.write.put import PutRequest, check_expected, condemned_of
from tensorstore_ck.errors import MissingObjectError, SnapshotAbortedError, SnapshotExpiredError
from tensorstore_ck.format.record import Record, record_name
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.log import Objects, Op, RefTable, SnapshotInfo
from tensorstore_ck.log.retention import expire_at_put
from tensorstore_ck.session.group.pipeline_stages import read_part

MOVES_OBJECTS: Final = frozenset({"condemn", "sweep", "relocate", "settle"})


class RankParts(NamedTuple):
    """What a rank tells of what it has written."""

    ulids: list[Ulid]
    """Of its part, and of its own state's."""
    part_ids: list[Digest]
    new_bytes: int
    anchor: int
    checked: int
    """The log entry at whose fold it found everything in place."""
    condemned: Objects
    """What was condemned there, and must be rescued."""

    def record(self) -> Body:
        """As it travels."""
        return {
            "ulids": b"".join(self.ulids),
            "part_ids": b"".join(self.part_ids),
            "new_bytes": self.new_bytes,
            "anchor": self.anchor,
            "checked": self.checked,
            "condemned": self.condemned.fields(),
        }

    @classmethod
    def of_record(cls, record: Body) -> "RankParts":
        """Raises:
        TypeError: that is none.
        """
        ulids, ids = take(record, "ulids", bytes), take(record, "part_ids", bytes)
        return cls(
            [Ulid(ulids[at : at + ULID_BYTES]) for at in range(0, len(ulids), ULID_BYTES)],
            [Digest(ids[at : at + DIGEST_BYTES]) for at in range(0, len(ids), DIGEST_BYTES)],
            take_count(record, "new_bytes"),
            take_count(record, "anchor"),
            take_count(record, "checked"),
            Objects.of_fields(take(record, "condemned", dict)),
        )


def checked_parts(engine: Engine, written: Sequence[WrittenPart], anchor: int, *, sync: bool = True) -> RankParts:
    """What a rank has written, looked at as of now; or, without `sync`, as of the last entry that it knows.

    Raises:
        SnapshotExpiredError: gc freed something that it relies on: it must be written again.
    """
    head = engine.log.sync() if sync else engine.log.view().head()
    checked = head.n if head is not None else 0
    return RankParts(
        [each.ulid for each in written],
        [each.part.part_id() for each in written],
        sum(each.new_bytes for each in written),
        anchor,
        checked,
        condemned_of(engine, engine.log.view(), (), [(each.ulid, each.part) for each in written]),
    )


def record_of(engine: Engine, request: PutRequest, ranks: Sequence[RankParts], *, logical_bytes: int, streams: str = "") -> Record:
    """The record of what all `ranks`, in their order, have written.

    `streams` is the rule of derived streams, if there are rank states.
    """
    return Record(
        request.ref,
        request.step,
        request.parent,
        request.metadata,
        request.metrics,
        engine.clock(),
        ulids_of(ranks),
        b"".join(rank.part_ids[at] for at in range(len(ranks[0].ulids)) for rank in ranks),
        logical_bytes,
        sum(rank.new_bytes for rank in ranks),
        streams,
    )


def ulids_of(ranks: Sequence[RankParts]) -> list[Ulid]:
    """Of all parts, as a record has them."""
    return [rank.ulids[at] for at in range(len(ranks[0].ulids)) for rank in ranks]


def publish(
    engine: Engine,
    request: PutRequest,
    record: Record,
    ranks: Sequence[RankParts],
    *,
    txn: Ulid,
    mark: tuple[str, str] | None = None,
) -> SnapshotInfo:
    """Publishes what all `ranks` have written as one snapshot, whose ULID is `txn`.

    Args:
        engine: The store.
        request: What the put says.
        record: The snapshot's.
        ranks: In rank order.
        txn: If the log has an outcome for it already, that one holds.
        mark: A mark for the snapshot, and the reason.

    Raises:
        ConflictError: the ref is elsewhere.
        SnapshotAbortedError: another process gave up the put first.
        SnapshotExpiredError: gc freed something that it relies on.
    """
    snapshot, encoded = txn, record.encode()  # of one id, so that salvage knows the record of an aborted put
    engine.backend.put(record_name(snapshot), encoded)
    put = Op.put(request.ref, snapshot, record, encoded, anchor=min(rank.anchor for rank in ranks), txn=txn)

    def build(view: RefTable) -> list[Op]:
        if view.outcome(txn) is not None:
            return []
        check_expected(engine, view, request.ref, request.expect)
        condemned = condemned_of_ranks(engine, view, snapshot, ranks)
        marks = [Op.mark(put.fields["root"], *mark)] if mark is not None else []
        going = expire_at_put(view, request.ref, snapshot, record, engine.clock())
        return [put, *marks, *going, *([Op.rescue(condemned)] if condemned else [])]

    info = engine.log.published(engine.log.append(build), txn)
    if info is None:
        raise SnapshotAbortedError(f"the put to {request.ref!r} was aborted by another rank before it was published", object_id=request.ref)
    return info


def condemned_of_ranks(engine: Engine, view: RefTable, snapshot: Ulid, ranks: Sequence[RankParts]) -> Objects:
    """What must be rescued at this head: what the ranks found, unless the log has moved objects since one of them looked."""
    since = min(rank.checked for rank in ranks)
    if not any(op.name in MOVES_OBJECTS for entry in engine.log.entries(since + 1) for op in entry.ops):
        return Objects(key for rank in ranks for key in rank.condemned)
    try:
        parts = [(ulid, read_part(engine, ulid)) for ulid in ulids_of(ranks)]
    except MissingObjectError as exc:
        raise SnapshotExpiredError(f"this snapshot needs {exc.object_id}, which gc freed", object_id=exc.object_id) from exc
    return condemned_of(engine, view, [snapshot], parts)

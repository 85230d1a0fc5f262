"""What each rank has written and checked: a small record with which one process publishes for all.

A single process is the only rank. Does not know how ranks communicate nor what they hold.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid, split_ulids
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.part_writer import WrittenPart
from tensorstore_ck.engine.write.publish import condemned_of
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.errors import MissingObjectError, SnapshotExpiredError
from tensorstore_ck.format.part import Part, decode_part, part_name
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.log import Objects, RefTable

MOVES_OBJECTS: Final = frozenset({"condemn", "sweep", "relocate", "settle"})


class RankParts(NamedTuple):
    """A rank's report on its parts."""

    ulids: list[Ulid]
    """The ULIDs of its part, and of the part of its own state."""
    part_ids: list[Digest]
    new_bytes: int
    anchor: int
    checked: int
    """The log entry at which the rank checked that gc had freed nothing of its parts."""
    condemned: Objects
    """The objects that were condemned at that entry, and must be rescued."""

    def record(self) -> Body:
        """The record that is sent to the other ranks."""
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
        TypeError: it is malformed.
        """
        ulids, ids = take(record, "ulids", bytes), take(record, "part_ids", bytes)
        return cls(
            ulids=split_ulids(ulids),
            part_ids=[Digest(ids[at : at + DIGEST_BYTES]) for at in range(0, len(ids), DIGEST_BYTES)],
            new_bytes=take_count(record, "new_bytes"),
            anchor=take_count(record, "anchor"),
            checked=take_count(record, "checked"),
            condemned=Objects.of_fields(take(record, "condemned", dict)),
        )


def checked_parts(engine: Engine, written: Sequence[WrittenPart], anchor: int, view: RefTable) -> RankParts:
    """The report on what a rank has written, checked at the head of `view`.

    Raises:
        SnapshotExpiredError: gc freed something that it relies on: it must be written again.
    """
    head = view.head()
    checked = head.n if head is not None else 0
    return RankParts(
        ulids=[one.ulid for one in written],
        part_ids=[one.part.part_id() for one in written],
        new_bytes=sum(one.new_bytes for one in written),
        anchor=anchor,
        checked=checked,
        condemned=condemned_of(engine, view, (), [(one.ulid, one.part) for one in written]),
    )


def record_of(engine: Engine, request: SaveRequest, reports: Sequence[RankParts], *, logical_bytes: int, streams: str = "") -> Record:
    """The record of the parts of all ranks, in their order. `streams`: the rule of derived streams, if there are rank states."""
    made_ns = request.origin.made_ns
    return Record(
        ref=request.ref,
        step=request.step,
        parent=request.parent,
        metadata=request.metadata,
        metrics=request.metrics,
        time_ns=engine.clock() if made_ns is None else made_ns,
        parts=ulids_of(reports),
        part_ids=b"".join(rank.part_ids[at] for at in range(len(reports[0].ulids)) for rank in reports),
        logical_bytes=logical_bytes,
        new_bytes=sum(rank.new_bytes for rank in reports),
        streams=streams,
        triggers=request.origin.triggers,
        epoch=request.origin.epoch,
        attributes=request.origin.attributes,
    )


def ulids_of(reports: Sequence[RankParts]) -> list[Ulid]:
    """The ULIDs of all parts, in the order of a record."""
    return [rank.ulids[at] for at in range(len(reports[0].ulids)) for rank in reports]


def condemned_of_ranks(engine: Engine, view: RefTable, snapshot: Ulid, reports: Sequence[RankParts]) -> Objects:
    """The objects to rescue at this head: those that the ranks reported, unless the log has moved objects since one of them looked."""
    since, head = min(rank.checked for rank in reports), view.head()
    newer = engine.log.entries(since + 1) if head is not None and head.n > since else ()
    if not any(op.name in MOVES_OBJECTS for entry in newer for op in entry.ops):
        return Objects(key for rank in reports for key in rank.condemned)
    try:
        parts = [(ulid, read_part(engine, ulid)) for ulid in ulids_of(reports)]
    except MissingObjectError as exc:
        raise SnapshotExpiredError(f"this snapshot needs {exc.object_id}, which gc freed", object_id=exc.object_id) from exc
    return condemned_of(engine, view, [snapshot], parts)


def read_part(engine: Engine, ulid: Ulid) -> Part:
    """Reads a part, whether or not a snapshot names it."""
    name = part_name(ulid)
    return decode_part(engine.backend.get(name, max_bytes=1 << 28), name)

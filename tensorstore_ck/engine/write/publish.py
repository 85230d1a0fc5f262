"""The last steps of every save: its record becomes durable, then one log entry publishes it. Its packs and parts are durable already.

    packs -> parts -> record -> log entry

A crash or an error before the entry leaves orphans only. Saves of one process and of many ranks, staged saves, copies and DCP's writer all
end here; each passes a function that arranges its own operations for the entry. `RankParts` reports what a rank has written. Knows neither
how ranks communicate nor torch.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Final, NamedTuple, TypeVar

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid, split_ulids, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import condemned_among, locate_blocks
from tensorstore_ck.engine.write.branch_conflict import moved_away
from tensorstore_ck.engine.write.part_writer import WrittenPart
from tensorstore_ck.engine.write.request import ANY, Expected, SaveRequest
from tensorstore_ck.errors import ConflictError, InvalidOptionError, MissingObjectError, SnapshotAbortedError, SnapshotExpiredError
from tensorstore_ck.format.part import Part, decode_part, part_name
from tensorstore_ck.format.record import Record, record_name
from tensorstore_ck.format.sealed import Body, take, take_count
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable, SnapshotRow
from tensorstore_ck.log.follow import Also
from tensorstore_ck.log.quota import check_quotas, quotas_of, warn_of_quotas
from tensorstore_ck.log.retention import expire_at_save

T = TypeVar("T")

Accepted = Expected | tuple[Digest | None, ...]
"""Where a ref must be for a save to move it. Of a staged save: at one of several roots, since others may be published before it."""

_logger: Final = logging.getLogger("tensorstore_ck.engine")
MAX_TRIES: Final = 4


def retry_expired(attempt: Callable[[], T], before_retry: Callable[[], object] = lambda: None) -> T:
    """Calls `attempt` again, a few times, if gc freed blocks that it relied on before it committed. The bytes are still in memory."""
    for _ in range(MAX_TRIES - 1):
        try:
            return attempt()
        except SnapshotExpiredError as exc:
            _logger.debug("written again: %s", exc)
            before_retry()
    return attempt()


def publish(
    engine: Engine,
    record: Record,
    *,
    txn: Ulid,
    anchor: int,
    arrange: Callable[[RefTable, Op], list[Op]],
    condemned: Callable[[RefTable], Objects],
    staged: Ulid | None = None,
    snapshot: Ulid | None = None,
    stored: bytes | None = None,
    began_ns: int | None = None,
    also: Also | None = None,
    at: RefTable | None = None,
) -> SnapshotRow:
    """Makes the record of a snapshot durable, unless it is, and appends the entry that publishes it. Its packs and parts are durable.

    `txn`: the transaction; if the log has an outcome for it already, that one holds. `anchor`: the oldest head at which the save chose
    blocks to rely on: see gc/PROTOCOL.md. `arrange` gets a view of the log and the operation that publishes, checks that the ref is where
    it must be, and returns the operations of the entry; if it returns none, nothing is published. `condemned` returns which objects of the
    snapshot are condemned at that head, and must be rescued; it raises `SnapshotExpiredError` if gc freed one.

    `staged`: the transaction under which the snapshot was staged. `snapshot`: the ULID of its record; by default `staged`, or else `txn`,
    so that salvage recognises the record of an aborted save. `stored`: the bytes of the record, if it is in the store. `began_ns`: when the
    save began, by the engine's clock, for the entry to say how long it took. `also`, `at`: see `Log.append`.

    Raises:
        ConflictError: the ref is elsewhere; nothing is visible.
        QuotaExceededError: the quota of the branch is used up; nothing is visible.
        SnapshotAbortedError: another process gave the save up first.
        SnapshotExpiredError: gc freed something that it relies on.
        UndecidedError: the backend went away in the middle of the commit.
    """
    snapshot = snapshot or staged or txn
    if stored is None:
        stored = record.encode()
        engine.backend.put(record_name(snapshot), stored)
    duration_ns = None if began_ns is None else max(0, engine.clock() - began_ns)
    if _logger.isEnabledFor(logging.DEBUG):
        address, root = record.ref if record.step is None else f"{record.ref}@{record.step}", record.root().hex()
        _logger.debug("publish %s, root %s, as %s in transaction %s", address, root, record_name(snapshot), ulid_text(txn))
    put = Op.put(record.ref, snapshot, record, stored, anchor=anchor, txn=txn, staged=staged, duration_ns=duration_ns)

    def build(view: RefTable) -> list[Op]:
        ops = [] if view.outcome(txn) is not None else arrange(view, put)
        needed = condemned(view) if ops else None
        if not ops:
            _logger.debug("transaction %s is decided already, or has nothing to do", ulid_text(txn))
        elif needed:
            _logger.debug("rescue what gc has condemned of it: %s", ", ".join(key.name for key in needed))
        return [*ops, Op.rescue(needed)] if needed else ops

    info = engine.log.published(engine.log.append(build, also=also, at=at), snapshot)
    if info is None:
        raise SnapshotAbortedError(
            f"the save to {record.ref!r} was aborted by another process before it was published", object_id=record.ref
        )
    return info


def move_operations(
    engine: Engine, record: Record, view: RefTable, put: Op, *, expect: Accepted, mark: tuple[str, str] | None = None
) -> list[Op]:
    """For `publish`: moves the record's branch from where it is expected; the same entry expires what the branch's policies drop.

    `mark`: a mark for the snapshot, and the reason. A staged save was admitted before: it is published even if a quota is used up by now.

    Raises:
        ConflictError, QuotaExceededError: see `check_branch`.
    """
    check_expected(engine, view, record.ref, expect)
    check = quotas_of if "staged" in put.fields else check_quotas
    if view.quotas() and (quotas := check(view, record.ref)):
        warn_of_quotas(engine.backend.url, quotas=quotas, ref=record.ref, new_bytes=record.new_bytes, warned=engine.warned_quotas)
    marks = [Op.mark(put.fields["root"], *mark)] if mark is not None else []
    expired = expire_at_save(view, put, engine.clock(), engine.backend.url) if view.policies() else ()
    return [put, *marks, *expired]


def check_branch(engine: Engine, view: RefTable, ref: str, expect: Accepted) -> None:
    """Checks that a save may move the ref.

    Raises:
        ConflictError: the ref is elsewhere; see `check_expected`.
        QuotaExceededError: a quota of the ref is used up.
    """
    check_expected(engine, view, ref, expect)
    if view.quotas():
        check_quotas(view, ref)


def check_expected(engine: Engine, view: RefTable, ref: str, expect: Accepted) -> None:
    """The precondition of a save: fencing, so that a job that was given up for dead cannot move its successor's ref.

    Raises:
        ConflictError: the ref is elsewhere; the message says who moved it, and how to go on.
    """
    if view.tag_row(ref) is not None:
        raise InvalidOptionError(f"{ref!r} is a tag, and tags never move: save to a branch", object_id=ref)
    branch, accepted = view.branch(ref), expect if isinstance(expect, tuple) else (expect,)
    if expect is ANY or (branch.root if branch is not None else None) in accepted:
        return
    if branch is None:
        raise ConflictError(f"ref {ref!r} does not exist, but was expected to", object_id=ref)
    last = accepted[-1]
    raise moved_away(engine, view, branch, last if isinstance(last, bytes) else None)


def condemned_of(engine: Engine, view: RefTable, snapshots: Sequence[Ulid], parts: Sequence[tuple[Ulid, Part]]) -> Objects:
    """The objects of these parts and records that are condemned in `view`.

    Raises:
        SnapshotExpiredError: gc freed something of them already: their blocks must be written again.
    """
    needed, anchor = [*map(partial(ObjectKey, "snapshot"), snapshots)], parts[0][1].anchor
    try:
        for ulid, part in parts:
            anchor = min(anchor, part.anchor)
            needed += [ObjectKey("part", ulid), *locate_blocks(engine, view, part).objects()]
    except MissingObjectError as exc:
        raise SnapshotExpiredError(f"this snapshot needs {exc.object_id}, which gc freed", object_id=exc.object_id) from exc
    return condemned_among(view, needed, anchor, "this snapshot")


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
    parts, part_ids, new_bytes = dict[Ulid, Part](), list[Digest](), 0
    for one in written:
        parts[one.ulid] = one.part
        part_ids.append(one.part.part_id())
        new_bytes += one.new_bytes
    return RankParts(
        ulids=[*parts],
        part_ids=part_ids,
        new_bytes=new_bytes,
        anchor=anchor,
        checked=head.n if head is not None else 0,
        condemned=condemned_of(engine, view, (), [*parts.items()]),
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
        parts=in_record_order(map(attrgetter("ulids"), reports)),
        part_ids=b"".join(in_record_order(map(attrgetter("part_ids"), reports))),
        logical_bytes=logical_bytes,
        new_bytes=sum(map(attrgetter("new_bytes"), reports)),
        streams=streams,
        triggers=request.origin.triggers,
        epoch=request.origin.epoch,
        attributes=request.origin.attributes,
    )


def in_record_order(of_ranks: Iterable[Sequence[T]]) -> list[T]:
    """What each rank has of its parts, in the order of a record: of the first part of each rank, then of the second of each."""
    return [*chain.from_iterable(zip(*of_ranks, strict=True))]


def condemned_of_ranks(engine: Engine, snapshot: Ulid, reports: Sequence[RankParts], view: RefTable) -> Objects:
    """The objects to rescue at this head: those that the ranks reported, unless the log has moved objects since one of them looked."""
    since, head = min(map(attrgetter("checked"), reports)), view.head()
    if head is None or head.n <= since or not any(op.name in MOVES_OBJECTS for entry in engine.log.entries(since + 1) for op in entry.ops):
        return Objects(chain.from_iterable(map(attrgetter("condemned"), reports)))
    try:
        parts = [(ulid, read_part(engine, ulid)) for ulid in in_record_order(map(attrgetter("ulids"), reports))]
    except MissingObjectError as exc:
        raise SnapshotExpiredError(f"this snapshot needs {exc.object_id}, which gc freed", object_id=exc.object_id) from exc
    return condemned_of(engine, view, [snapshot], parts)


def read_part(engine: Engine, ulid: Ulid) -> Part:
    """Reads a part, whether or not a snapshot names it."""
    name = part_name(ulid)
    return decode_part(engine.backend.get(name, max_bytes=1 << 28), name)

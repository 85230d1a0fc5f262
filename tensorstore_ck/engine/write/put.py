"""Saves one snapshot of one process; and destinations: where the bytes of any save go. Knows no torch."""

from collections.abc import Sequence
from typing import Protocol

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.put_progress import PutMeter
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.compare_parent import ParentComparison
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.failed_save import deleted_if_full
from tensorstore_ck.engine.write.part_writer import BlockLookup, WrittenPart, slot_of_one, write_part
from tensorstore_ck.engine.write.publish import retry_expired
from tensorstore_ck.engine.write.quota_check import check_quotas
from tensorstore_ck.engine.write.rank_parts import RankParts, checked_parts, publish_parts, record_of
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.errors import UndecidedError
from tensorstore_ck.format.record import Record
from tensorstore_ck.log import SnapshotInfo


class Destination(Protocol):
    """Where a save's bytes become durable, and the log entry that then says so: for a store itself, or a staging disk in front of it."""

    @property
    def engine(self) -> Engine:
        """Writes packs and parts there."""

    @property
    def is_offline(self) -> bool:
        """Whether the store does not answer: nothing of it is asked for, or relied on."""

    @property
    def is_staging(self) -> bool:
        """Whether the entry says "staged", and not "put"."""

    def admit(self, request: PutRequest) -> None:
        """Refuses a save whose ref is not where it must be, or has no quota left; checked again when the entry is appended."""

    def begin(self, request: PutRequest) -> None:
        """Looks for what the save may share blocks with."""

    def known(self, request: PutRequest, number: int, ranks: int) -> BlockLookup:
        """Which blocks of part `number` need not be written."""

    def wrote(self, request: PutRequest) -> None:
        """A rank of several has written its parts: it makes sure that rank 0 can read them, and that a crash loses nothing."""

    def commit(
        self, request: PutRequest, record: Record, parts: Sequence[RankParts], txn: Ulid, mark: tuple[str, str] | None = None
    ) -> SnapshotInfo:
        """Makes the record durable, and appends the entry: see `publish_parts`."""

    def keep(self, info: SnapshotInfo, written: Sequence[WrittenPart]) -> None:
        """Remembers what the next save is likely to need."""


class StoreDestination:
    """The store itself."""

    is_offline = is_staging = False

    def __init__(self, engine: Engine, rank: int = 0) -> None:
        """`rank`: of several that save together, or 0."""
        self.engine = engine
        self._rank = rank

    def admit(self, request: PutRequest) -> None:
        """On rank 0, which decides for all, checks quotas. The ref is checked when the entry is appended: until then it may move.

        Raises:
            QuotaExceededError: the quota of the ref is used up.
        """
        if self._rank == 0:
            self.engine.log.look(lambda view: check_quotas(view, request.ref))

    def begin(self, request: PutRequest) -> None:
        """What is shared is looked for in the snapshot that the request names."""

    def known(self, request: PutRequest, number: int, ranks: int) -> BlockLookup:
        """See `Destination`."""
        return DedupIndex(self.engine, request.nearest, number, ranks)

    def wrote(self, request: PutRequest) -> None:
        """What is in the store can be read by all."""

    def commit(
        self, request: PutRequest, record: Record, parts: Sequence[RankParts], txn: Ulid, mark: tuple[str, str] | None = None
    ) -> SnapshotInfo:
        """See `Destination`."""
        return publish_parts(self.engine, request, record, parts, txn=txn, mark=mark)

    def keep(self, info: SnapshotInfo, written: Sequence[WrittenPart]) -> None:
        """See `Destination`."""
        self.engine.note_published()
        for each in written:
            self.engine.keep_part(each.ulid, each.part)
            self.engine.index.add(each.added.items(), published_at=info.n)


def put(engine: Engine, captured: CapturedState, request: PutRequest, meter: PutMeter | None = None) -> SnapshotInfo:
    """Stores a state and moves the ref to it; returns once both are durable. The caller has synced the log.

    `meter` sees how it goes; what it raises gives the save up.

    Raises:
        ConflictError: the ref is not where it was expected; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine.require_writable()
    with deleted_if_full(engine) as engine_of_save:
        destination = StoreDestination(engine_of_save)
        return retry_expired(lambda: put_once(captured, request, meter or PutMeter(), destination), engine.log.sync)


def put_once(
    captured: CapturedState, request: PutRequest, meter: PutMeter, destination: Destination, txn: Ulid | None = None
) -> SnapshotInfo:
    """One try of `put`, to any destination; `txn` is the snapshot's ULID, if it has one already.

    Raises:
        SnapshotExpiredError: gc freed something that it relies on.
    """
    engine = destination.engine
    destination.admit(request)
    destination.begin(request)
    head, known, slot = engine.log.view().head(), destination.known(request, 0, 1), slot_of_one(captured)
    anchor, coding, sampling = head.n if head else 0, request.coding, request.sampling
    written = write_part(engine, captured, known, anchor=anchor, slot=slot, coding=coding, meter=meter, sampling=sampling)
    if destination.is_offline:  # nothing is compared with what may have to be read from the store
        request = request.noted(written.tensors.sample.finiteness)
    else:
        request = request.judged(engine, ParentComparison(engine, written, captured, request.claim).examine())
    with meter.timed("commit"):
        sync = destination.is_staging and not destination.is_offline  # what is staged is published much later
        parts = [checked_parts(engine, [written], anchor, sync=sync)]
        record = record_of(engine, request, parts, logical_bytes=captured.logical_bytes)
        txn = txn or engine.put_id()
        try:
            info = destination.commit(request, record, parts, txn)
        except UndecidedError as exc:
            exc.txn = txn
            raise
    destination.keep(info, [written])
    return info

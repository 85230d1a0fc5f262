"""The last two phases of a save: `write` makes the part of a process alone durable, and `commit` ends every save. Knows no torch.

The ranks of a group write their parts by `session/group/rank_save.py`, and rank 0 commits for all. A `Destination` is where the bytes
become durable: the store, or a staging disk in front of it (`session/staging/staging_destination.py`).
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Final, Protocol, Self, TypeVar

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.compare_parent import ParentComparison
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import BlockLookup, WrittenPart, write_part
from tensorstore_ck.engine.write.publish import (
    MAX_TRIES,
    RankParts,
    check_branch,
    checked_parts,
    condemned_of_ranks,
    move_operations,
    publish,
    record_of,
)
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.engine.write.suspicious_save import SaveFindings, judge
from tensorstore_ck.engine.write.write_plan import only_author
from tensorstore_ck.errors import NoSpaceError, SnapshotExpiredError, StoreError, UndecidedError
from tensorstore_ck.format.record import Record, with_store_metadata
from tensorstore_ck.format.sealed import FOLDERS
from tensorstore_ck.log import ObjectKey, RefTable, SnapshotRow
from tensorstore_ck.log.block_index import notes_of, write_notes
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.quota import check_quotas

T = TypeVar("T")

_logger: Final = logging.getLogger("tensorstore_ck.engine")


class Destination(Protocol):
    """Where a save's bytes become durable, and which log entry reports that."""

    @property
    def engine(self) -> Engine:
        """Writes packs and parts there."""

    @property
    def txn(self) -> Ulid | None:
        """The snapshot's ULID, if it has one before it is committed."""

    @property
    def is_offline(self) -> bool:
        """Whether the store does not answer. If so, nothing is read from it, and the save relies on no block in it."""

    @property
    def is_staging(self) -> bool:
        """Whether the save is staged here, and published later."""

    def wait_turn(self) -> None:
        """Waits until this process may begin to write, where ranks are staggered."""

    def ask(self, call: Callable[[], T]) -> T:
        """The result of `call`, which may need the store. Raises if that takes long and the save can do without."""

    def admit(self, request: SaveRequest, view: RefTable) -> None:
        """Refuses a save whose ref is not where it must be, or has no quota left; checked again when the entry is appended."""

    def known(self, request: SaveRequest, view: RefTable, number: int, ranks: int) -> BlockLookup:
        """Which blocks of part `number` need not be written, by a `view` whose head is the anchor."""

    def wrote(self, request: SaveRequest, written: Sequence[WrittenPart]) -> None:
        """Called when this process has written its parts. Rank 0 must be able to read those of the others, and a crash must lose none."""

    def publish_or_stage(
        self, request: SaveRequest, record: Record, reports: Sequence[RankParts], *, txn: Ulid, mark: tuple[str, str] | None, at: RefTable
    ) -> SnapshotRow:
        """Makes the record durable, and publishes the snapshot; of a save that is staged, says so in the log where others must know.

        `reports`: the parts of all ranks, in their order. `txn`: the transaction, and the snapshot's ULID. `mark`: a mark for the
        snapshot, and the reason. `at`: see `Log.append`.
        """

    def keep(self, info: SnapshotRow) -> None:
        """Remembers what the next save is likely to need of the parts that this process wrote."""

    def go_offline(self) -> bool:
        """Continues without the store, if it does not answer; returns False if that is not possible."""

    def may_repeat(self, error: StoreError) -> bool:
        """Whether a process alone may write and commit again after this error, as of a newer view of the log; prepares that."""


class StoreDestination:
    """The store itself. As a context manager around a save it deletes what the save has written if that fails for space.

    Otherwise it would fill the disk until gc judges it by its age. Only names that this save itself drew are deleted, and only if its log
    entry was never sent, which `NoSpaceError` says: a save whose entry may be there raises `UndecidedError`. See gc/PROTOCOL.md, "Who
    deletes objects".
    """

    is_offline = is_staging = False
    txn: Ulid | None = None

    def __init__(self, engine: Engine, rank: int = 0, *, is_alone: bool = False, wait_turn: Callable[[], object] | None = None) -> None:
        """`rank`: this process's rank, or 0. If `is_alone`, `admit` checks where the ref is before anything is written."""
        self.engine = engine
        self._rank = rank
        self._is_alone = is_alone
        self._wait_turn = wait_turn
        self._written: Sequence[WrittenPart] = ()
        self._is_indexed = False
        """Whether the block index has the blocks of `_written`."""

    def wait_turn(self) -> None:
        """See `Destination`."""
        if self._wait_turn is not None:
            self._wait_turn()

    def ask(self, call: Callable[[], T]) -> T:
        """Waits for the store."""
        return call()

    def __enter__(self) -> Self:
        self.engine = replace(self.engine, unpublished=[])
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, NoSpaceError):
            names = [ObjectKey(kind, name).name for name in self.engine.unpublished or () for kind in FOLDERS if kind != "moved"]
            with suppress(StoreError):  # gc frees what is left
                self.engine.backend.delete(names)

    def admit(self, request: SaveRequest, view: RefTable) -> None:
        """Checks quotas on rank 0, and of a process alone the ref. Both are checked again when the entry is appended.

        Raises:
            ConflictError: the ref is not where it must be.
            QuotaExceededError: the quota of the ref is used up.
        """
        if self._is_alone:
            check_branch(self.engine, view, request.ref, request.expect)
        elif self._rank == 0:
            check_quotas(view, request.ref)

    def known(self, request: SaveRequest, view: RefTable, number: int, ranks: int) -> BlockLookup:
        """See `Destination`."""
        return DedupIndex(self.engine, request.nearest, number, ranks, view=view)

    def wrote(self, request: SaveRequest, written: Sequence[WrittenPart]) -> None:
        """Notes the parts: all ranks can read what is in the store."""
        self._written, self._is_indexed = written, False

    def publish_or_stage(
        self, request: SaveRequest, record: Record, reports: Sequence[RankParts], *, txn: Ulid, mark: tuple[str, str] | None, at: RefTable
    ) -> SnapshotRow:
        """See `Destination`."""
        engine = self.engine
        info = publish(
            engine,
            record,
            txn=txn,
            anchor=min(map(attrgetter("anchor"), reports)),
            arrange=partial(move_operations, engine, record, expect=request.expect, mark=mark),
            condemned=partial(condemned_of_ranks, engine, txn, reports),
            began_ns=request.began_ns,
            also=self._index,
            at=at,
        )
        engine.keep_record(info.ulid, record)
        return info

    def keep(self, info: SnapshotRow) -> None:
        """See `Destination`."""
        self.engine.note_published()
        for part in self._written:
            self.engine.keep_part(part.ulid, part.part)
            if not self._is_indexed:
                self.engine.index.add(part.added.items(), published_at=info.n)

    def _index(self, batch: Batch, n: int) -> None:
        """Adds the new blocks to the block index in the batch that folds the entry: a second batch would wait for the disk again."""
        for part in self._written:
            write_notes(batch, notes_of(part.added.items(), n))
        self._is_indexed = True

    def go_offline(self) -> bool:
        """See `Destination`."""
        return False

    def may_repeat(self, error: StoreError) -> bool:
        """After gc freed blocks that the save relied on, at the newest entry: the bytes are still in memory."""
        if not isinstance(error, SnapshotExpiredError):
            return False
        _logger.debug("written again: %s", error)
        self.engine.log.sync()
        return True


def write(
    destination: Destination, captured: CapturedState, request: SaveRequest, meter: SaveMeter, view: RefTable
) -> tuple[RankParts, SaveFindings]:
    """Writes the only part of a snapshot, and compares it with the snapshot before; the head of `view` is its anchor.

    Raises:
        SnapshotExpiredError: gc freed something that it relies on.
    """
    engine, is_offline = destination.engine, destination.is_offline
    destination.admit(request, view)
    head, known, author = view.head(), destination.known(request, view, 0, 1), only_author(captured)
    anchor = head.n if head is not None else 0
    written = write_part(
        engine, captured, known, anchor=anchor, author=author, coding=request.coding, meter=meter, sampling=request.sampling
    )
    if is_offline:  # a comparison might have to read from the store
        finiteness = written.tensors.sample.finiteness
        findings = SaveFindings(elements=finiteness.elements, non_finite=finiteness.non_finite)
    else:
        findings = ParentComparison(engine=engine, view=view, written=written, captured=captured, request=request).examine()
    destination.wrote(request, [written])
    with meter.timed("commit"):
        is_published_later = destination.is_staging and not is_offline  # gc may have condemned something since `view`
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
) -> SnapshotRow:
    """Judges the findings of all ranks, and commits their parts: the record, then one log entry.

    `reports`, `findings`: of each rank, in their order. `logical_bytes`: of the whole state. `view`: the log at an entry that has the
    snapshot before. `txn`: the snapshot's ULID; None: a new one. `streams`: see `record_of`. `mark`: for the snapshot, and the reason.

    Raises:
        SuspiciousSaveError: the content contradicts the step; nothing is published.
        ConflictError: the ref is elsewhere; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine, (found, *others) = destination.engine, findings
    for rank_findings in others:
        found.merge(rank_findings)
    judge(engine, view, found, request)
    if found.non_finite:
        request = request._replace(metadata=with_store_metadata(request.metadata, {"non_finite": found.finiteness.share}))
    with meter.timed("commit"):
        record = record_of(engine, request, reports, logical_bytes=logical_bytes, streams=streams)
        txn = txn or destination.txn or engine.put_id()
        try:
            return destination.publish_or_stage(request, record, reports, txn=txn, mark=mark, at=view)
        except UndecidedError as exc:
            exc.txn = txn
            raise


def save_captured(engine: Engine, captured: CapturedState, request: SaveRequest) -> SnapshotRow:
    """Saves a state in the store; returns once it is durable and published. The caller has followed the log.

    Raises:
        ConflictError: the ref is not where it was expected; nothing is visible.
        UndecidedError: the backend went away in the middle of the commit.
    """
    engine.require_writable()
    with StoreDestination(engine) as destination:
        return write_and_commit(destination, captured=captured, request=request, meter=SaveMeter(), view=engine.log.view())


def write_and_commit(
    destination: Destination, captured: CapturedState, request: SaveRequest, meter: SaveMeter, view: RefTable
) -> SnapshotRow:
    """Both phases for a process alone, first as of `view`: see `Destination.may_repeat`."""
    for tries_left in reversed(range(MAX_TRIES)):
        try:
            report, findings = write(destination, captured=captured, request=request, meter=meter, view=view)
            info = commit(destination, request, [report], [findings], logical_bytes=captured.logical_bytes, meter=meter, view=view)
        except StoreError as exc:
            if not tries_left or not destination.may_repeat(exc):
                raise
        else:
            destination.keep(info)
            return info
        view = destination.engine.log.view()
    raise AssertionError("unreachable")

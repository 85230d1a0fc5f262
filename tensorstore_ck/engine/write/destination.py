"""Where the bytes of a save become durable: a store, or a staging disk in front of it. Knows no torch."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, Self, TypeVar

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import BlockLookup, WrittenPart
from tensorstore_ck.engine.write.publish import at_branch, check_expected, publish, retry_expired, store_record
from tensorstore_ck.engine.write.rank_parts import RankParts, condemned_of_ranks
from tensorstore_ck.engine.write.request import SaveRequest
from tensorstore_ck.errors import NoSpaceError, StoreError
from tensorstore_ck.format.folders import FOLDERS
from tensorstore_ck.format.record import Record
from tensorstore_ck.log import ObjectKey, RefTable, SnapshotInfo
from tensorstore_ck.log.block_index import write_blocks
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.quota import check_quotas

T = TypeVar("T")


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
        """Whether the entry says "staged", and not "put"."""

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

    def commit(
        self, request: SaveRequest, record: Record, reports: Sequence[RankParts], *, txn: Ulid, mark: tuple[str, str] | None, at: RefTable
    ) -> SnapshotInfo:
        """Makes the record durable, and appends the entry for the parts in all `reports`, in the order of ranks.

        `txn`: the transaction, and the snapshot's ULID. `mark`: a mark for the snapshot, and the reason. `at`: see `Log.append`.
        """

    def keep(self, info: SnapshotInfo) -> None:
        """Remembers what the next save is likely to need of the parts that this process wrote."""

    def go_offline(self) -> bool:
        """Continues without the store, if it does not answer; returns False if that is not possible."""

    def repeat(self, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, by which a process alone writes and commits: called again after errors that may pass by that."""


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
            check_expected(self.engine, view, request.ref, request.expect)
        if self._rank == 0:
            check_quotas(view, request.ref)

    def known(self, request: SaveRequest, view: RefTable, number: int, ranks: int) -> BlockLookup:
        """See `Destination`."""
        return DedupIndex(self.engine, request.nearest, number, ranks, view=view)

    def wrote(self, request: SaveRequest, written: Sequence[WrittenPart]) -> None:
        """Notes the parts: all ranks can read what is in the store."""
        self._written, self._is_indexed = written, False

    def commit(
        self, request: SaveRequest, record: Record, reports: Sequence[RankParts], *, txn: Ulid, mark: tuple[str, str] | None, at: RefTable
    ) -> SnapshotInfo:
        """See `Destination`."""
        engine = self.engine
        encoded = store_record(engine, txn, record)  # under the transaction's id, so that salvage recognises the record of an aborted save
        info = publish(
            engine,
            record,
            encoded,
            txn=txn,
            anchor=min(rank.anchor for rank in reports),
            arrange=at_branch(engine, record, request.expect, mark),
            condemned=lambda view: condemned_of_ranks(engine, view, txn, reports),
            began_ns=request.began_ns,
            also=self._index,
            at=at,
        )
        engine.keep_record(info.ulid, record)
        return info

    def keep(self, info: SnapshotInfo) -> None:
        """See `Destination`."""
        self.engine.note_published()
        for part in self._written:
            self.engine.keep_part(part.ulid, part.part)
            if not self._is_indexed:
                self.engine.index.add(part.added.items(), published_at=info.n)

    def _index(self, batch: Batch, n: int) -> None:
        """Adds the new blocks to the block index in the batch that folds the entry: a second batch would wait for the disk again."""
        for part in self._written:
            write_blocks(batch, part.added.items(), published_at=n)
        self._is_indexed = True

    def go_offline(self) -> bool:
        """See `Destination`."""
        return False

    def repeat(self, attempt: Callable[[], T]) -> T:
        """See `retry_expired`. Each further try is made at the newest entry."""
        return retry_expired(attempt, self.engine.log.sync)

"""The staging disk as a destination: packs, parts and record become durable on this host, and nothing is visible yet.

A save shares blocks with one published snapshot only, the base, which the log's ``staged`` entry pins. So all blocks are on the disks or
stay in the store, however long the upload takes (docs/decisions/010-staged-snapshots-pin-one-base.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, Self, TypeVar

from tensorstore_ck.backend.staging import StagingTier, StagingWriteBackend
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import BlockLookup, WrittenPart
from tensorstore_ck.engine.write.publish import RankParts, check_branch
from tensorstore_ck.engine.write.request import AnyHead, SaveRequest
from tensorstore_ck.errors import BackendUnavailableError, SnapshotAbortedError, SnapshotExpiredError, StoreError, UndecidedError
from tensorstore_ck.format.record import Record, record_name
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.session.staging.manifest import Accepts, Manifest, PublishingLead, manifest_key
from tensorstore_ck.session.staging.staged_chain import ChainedBlocks, StagedChain, StagedLink
from tensorstore_ck.session.staging.staged_entries import announce
from tensorstore_ck.session.staging.store_contact import StoreContact

T = TypeVar("T")

SMALL_BYTES: Final = 16 << 20


class StagingDestination:
    """A staging disk, for one process of a save: see `Destination`. A context manager around the save: after an error, what cannot be
    continued is deleted.
    """

    is_staging = True
    is_offline = False

    def __init__(
        self,
        engine: Engine,
        tier: StagingTier,
        chain: StagedChain,
        txn: Ulid,
        *,
        rank: int = 0,
        ranks: int = 1,
        stop: Callable[[], None] | None = None,
        contact: StoreContact | None = None,
    ) -> None:
        """`stop`: for a rank, called during the upload of parts; its error gives the save up. None: the process saves alone.

        `contact` limits how long a process alone waits for the store; ranks need the log to agree.
        """
        self.txn = txn
        self._store = engine
        self._tier = tier
        self._chain = chain
        self._links = chain.borrow()  # before the ref is looked up
        self._rank, self._ranks, self._stop = rank, ranks, stop
        self._contact = contact if stop is None else None
        self._begin_writing()

    def wait_turn(self) -> None:
        """Does not wait: uploads are staggered, not writes to this host's disk."""

    def _begin_writing(self) -> None:
        self._writes = StagingWriteBackend(self._tier.folder, self._store.backend, self.ask)
        self._known: list[ChainedBlocks] = []
        self._written: Sequence[WrittenPart] = ()
        self._accepts: Accepts = ()
        self._base: SnapshotRow | None = None
        self.manifest: Manifest | None = None
        """Set once the manifest is on the disk: from then on a crash loses nothing."""
        self.engine = replace(self._store, backend=self._writes, put_ids=None)
        """Writes to the staging disk. Its objects outlive this process, so gc must not take them for leftovers of a dead process."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if error is not None and not self._may_be_staged(error):
                self.give_up()
        finally:
            self._chain.give_back(self._links)

    def _may_be_staged(self, error: BaseException) -> bool:
        """Whether the next process that opens the store with this disk may have to continue the save."""
        if self._stop is not None:
            return isinstance(error, UndecidedError)  # the log may say "staged"; after another error the ranks have aborted it
        return self.manifest is not None and not isinstance(error, StoreError)

    def ask(self, call: Callable[[], T]) -> T:
        """See `Destination`."""
        return call() if self._contact is None else self._contact.ask(call)

    def go_offline(self) -> bool:
        """Continues without the store, if the store does not answer. Returns False for a rank of a group, which cannot, and for a save that
        already does.
        """
        if self._stop is not None or self.is_offline:
            return False
        self.is_offline = True
        return True

    def may_repeat(self, error: StoreError) -> bool:
        """See `Destination`. The second try has the same transaction: a late log entry may still say that the save was staged."""
        if not isinstance(error, BackendUnavailableError | UndecidedError | SnapshotExpiredError) or not self.go_offline():
            return False
        self.give_up()
        self._begin_writing()
        return True

    def admit(self, request: SaveRequest, view: RefTable) -> None:
        """Checks on rank 0 where the ref is: other ranks may not know yet what became of earlier saves.

        Raises:
            ConflictError: the ref is not where it may be.
            QuotaExceededError: its quota is used up.
        """
        self._accepts = self._links.accepts(request.expect)
        if self._rank == 0:
            check_branch(self._store, view, request.ref, self._accepts)

    def known(self, request: SaveRequest, view: RefTable, number: int, ranks: int) -> BlockLookup:
        """See `Destination`. All ranks find the same base."""
        base = self._base = None if self.is_offline else base_of(view, request)
        there = DedupIndex(self.engine, base.root, number, ranks, elsewhere=False, view=view) if base is not None else None
        self._known.append(ChainedBlocks(self._links, there))
        return self._known[-1]

    def wrote(self, request: SaveRequest, written: Sequence[WrittenPart]) -> None:
        """Notes the parts. Of a rank, uploads at once the small objects that other ranks need to open the snapshot."""
        self._written = written
        if self._stop is None:
            return
        self._tier.uploader.upload(self._small(), stop=self._stop)
        self._write_manifest(request, None)

    def publish_or_stage(
        self, request: SaveRequest, record: Record, reports: Sequence[RankParts], *, txn: Ulid, mark: tuple[str, str] | None, at: RefTable
    ) -> SnapshotRow:
        """Appends to the log that it is staged, if it shares blocks with others or has several ranks.

        Raises:
            SnapshotAbortedError: another rank has given it up.
            SnapshotExpiredError: gc has freed blocks that it shares.
        """
        sealed, base, is_alone = record.encode(), self._base.ulid if self._base is not None else None, self._stop is None
        (self.engine if is_alone else self._store).backend.put(record_name(txn), sealed)
        lead = PublishingLead(record=sealed, parts=reports, accepts=self._accepts, pinned=base, after=self._links.txns, mark=mark)
        self._write_manifest(request, lead)
        info = SnapshotRow.of_record(txn, record, sealed)
        if is_alone and base is None:
            return info
        # Before it is acknowledged: gc could free shared blocks.
        n = self.ask(partial(announce, self._store, lead, txn, request.ref, at=at))
        if n is None and not is_alone:
            raise SnapshotAbortedError(
                f"the save to {request.ref!r} was aborted by another rank before it was staged", object_id=request.ref
            )
        return info._replace(n=n or 0)

    def keep(self, info: SnapshotRow) -> None:
        """Adds the save to the chain, so that the next save builds on it."""
        for part in self._written:
            self._store.keep_part(part.ulid, part.part)
        added = {block: location for part in self._written for block, location in part.added.items()}
        accepts = () if isinstance(self._accepts, AnyHead) else self._accepts
        self._chain.add(StagedLink(txn=info.ulid, root=info.root, added=added, names=frozenset(self._names), accepts=accepts))

    def give_up(self) -> None:
        """Deletes everything that the save has written."""
        self._tier.folder.delete_manifest(manifest_key(self.txn, self._rank))
        self._tier.uploader.drop(self._writes.names)

    @property
    def _names(self) -> list[str]:
        """All objects that must be in the store before publishing, small ones first."""
        packs = [name for name in self._writes.names if name.startswith("packs/")]
        others = [name for name in self._writes.names if not name.startswith("packs/")]
        relied = sorted(set().union(*(known.packs for known in self._known)))
        return [*others, *relied, *packs]

    def _write_manifest(self, request: SaveRequest, lead: PublishingLead | None) -> None:
        size = sum(self._tier.folder.unsent.size(name) for name in self._writes.names)
        manifest = Manifest(
            txn=self.txn,
            ref=request.ref,
            step=request.step,
            rank=self._rank,
            ranks=self._ranks,
            names=self._names,
            size_bytes=size,
            lead=lead,
        )
        self._tier.folder.write_manifest(manifest.key, manifest.encode())
        self.manifest = manifest

    def _small(self) -> list[str]:
        """Parts, and the packs of the layout and large values."""
        names, size_of = self._writes.names, self._tier.folder.unsent.size
        return [
            *(name for name in names if not name.startswith("packs/")),
            *(name for name in names if name.startswith("packs/") and size_of(name) <= SMALL_BYTES),
        ]


def base_of(view: RefTable, request: SaveRequest) -> SnapshotRow | None:
    """The published snapshot with which a save most likely shares blocks."""
    branch = view.branch(request.ref)
    for root in (request.nearest, branch.root if branch is not None else None):
        info = view.by_root(root) if root is not None else None
        if info is not None and view.is_live(info.ulid):
            return info
    return None

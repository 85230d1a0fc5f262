"""The first step of a staged save: packs, parts and record become durable on the staging disks, and nothing is visible yet.

Blocks that a save shares with published snapshots are looked for in one of them alone, the base, which the log's ``staged`` entry pins: so
all blocks are on the disks or stay in the store, however long the upload takes (docs/decisions/010-staged-snapshots-pin-one-base.md).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, NamedTuple, cast

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.staging import StagingTier, StagingWriteBackend
from tensorstore_ck.common.ids import Digest, Ulid, ulid_text
from tensorstore_ck.common.put_progress import PutMeter
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.reachability import rescue_if_expired
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import BlockLookup, WrittenPart
from tensorstore_ck.engine.write.publish import AnyHead, check_expected, is_expected
from tensorstore_ck.engine.write.put import put_once
from tensorstore_ck.engine.write.quota_check import check_quotas
from tensorstore_ck.engine.write.rank_parts import RankParts
from tensorstore_ck.engine.write.request import PutRequest
from tensorstore_ck.errors import (
    BackendUnavailableError,
    SnapshotAbortedError,
    SnapshotExpiredError,
    StoreError,
    UndecidedError,
)
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.format.sealed import object_hash
from tensorstore_ck.log import Op, RefTable, SnapshotInfo
from tensorstore_ck.session.staging.manifest import Accepts, Manifest, PublishingLead, manifest_key
from tensorstore_ck.session.staging.outcome import published_as
from tensorstore_ck.session.staging.staged_chain import ChainedBlocks, StagedChain, StagedLink, StagedLinks

SMALL_BYTES: Final = 16 << 20


class StagedResult(NamedTuple):
    """The result of the first step."""

    info: SnapshotInfo
    manifest: Manifest


def check_accepted(engine: Engine, view: RefTable, ref: str, accepts: Accepts) -> None:
    """The precondition of a staged put.

    Raises:
        ConflictError: the ref is not where it may be.
    """
    branch, roots = view.branch(ref), (accepts,) if isinstance(accepts, AnyHead) else accepts
    check_expected(engine, view, ref, next((root for root in roots if is_expected(branch, root)), roots[-1]))


def owner_of(txn: Ulid) -> str:
    """The owner of the pin on the base."""
    return f"staged:{ulid_text(txn)}"


def pin_for(ref: str, txn: Ulid, root: Digest) -> Op:
    """Pins a snapshot with which a staged one shares blocks."""
    return Op.pin(root, owner_of(txn), f"a staged snapshot of {ref} shares its blocks", None)


def announce(engine: Engine, lead: PublishingLead, txn: Ulid, ref: str) -> int | None:
    """Appends to the log that it is staged, with pins on what it shares; returns that entry's number, None if the log has its outcome.

    Raises:
        SnapshotExpiredError: gc has freed blocks that it shares.
    """
    record = decode_record(lead.record, record_name(txn))

    def build(view: RefTable) -> list[Op]:
        if view.outcome(txn) is not None or view.staged(txn) is not None or view.snapshot(txn) is not None:
            return []
        if lead.pinned is not None and view.snapshot(lead.pinned) is None:
            raise SnapshotExpiredError(f"a staged snapshot of {ref!r} shares blocks with one that gc freed", object_id=ref)
        pins: list[Op] = []
        for shared in (lead.pinned, *lead.after):
            info = published_as(engine, view, shared) if shared is not None else None
            if info is not None:
                pins += [*rescue_if_expired(engine, view, info), pin_for(ref, txn, info.root)]
        return [Op.staged(ref, txn, record, lead.record, txn=txn), *pins]

    appended = engine.log.append(build)
    if appended.ops:
        return appended.n
    staged = engine.log.view().staged(txn)
    return staged.n if staged is not None else None


class StagingDestination:
    """A staging disk, for one process of a save; see `Destination`. It ends with `keep` or with `give_up`."""

    is_staging = True

    def __init__(
        self,
        engine: Engine,
        tier: StagingTier,
        chain: StagedChain,
        links: StagedLinks,
        txn: Ulid,
        *,
        rank: int = 0,
        ranks: int = 1,
        stop: Callable[[], None] | None = None,
        is_offline: bool = False,
    ) -> None:
        """`links`: borrowed from `chain`. `stop` is called during the upload of parts; its error gives the save up."""
        self.is_offline = is_offline
        self._store = engine
        self._tier = tier
        self._chain = chain
        self._links = links
        self._txn, self._rank, self._ranks, self._stop = txn, rank, ranks, stop
        self._writes = StagingWriteBackend(tier.folder, engine.backend)
        self._known: list[ChainedBlocks] = []
        self._accepts: Accepts = ()
        self._base: SnapshotInfo | None = None
        self.manifest: Manifest | None = None
        """Set once it is on the disk: from then on a crash loses nothing."""
        self.engine = replace(engine, backend=cast(Backend, self._writes), put_ids=None)
        """Writes to the staging disk. Its objects outlive this process, so gc must not take them for leftovers of a dead process."""

    def admit(self, request: PutRequest) -> None:
        """On rank 0, checks where the ref is: others may not know yet what became of earlier saves.

        Raises:
            ConflictError: the ref is not where it may be.
            QuotaExceededError: its quota is used up.
        """
        self._accepts = self._links.accepts(request.expect)
        if self._rank == 0:
            self._store.log.look(lambda view: check_accepted(self._store, view, request.ref, self._accepts))
            self._store.log.look(lambda view: check_quotas(view, request.ref))

    def begin(self, request: PutRequest) -> None:
        """Finds the base; all ranks find the same one."""
        if self._stop is not None:
            self._store.log.sync()
        self._base = None if self.is_offline else base_of(self._store.log.view(), request)

    def known(self, request: PutRequest, number: int, ranks: int) -> BlockLookup:
        """See `Destination`."""
        base = self._base
        there = DedupIndex(self.engine, base.root, number, ranks, elsewhere=False) if base is not None else None
        self._known.append(ChainedBlocks(self._links, there))
        return self._known[-1]

    def wrote(self, request: PutRequest) -> None:
        """Uploads at once what other ranks need to open the snapshot; it is small."""
        assert self._stop is not None
        self._tier.uploader.upload(self._small(), stop=self._stop)
        self._write_manifest(request, None)

    def commit(
        self, request: PutRequest, record: Record, parts: Sequence[RankParts], txn: Ulid, mark: tuple[str, str] | None = None
    ) -> SnapshotInfo:
        """Appends to the log that it is staged, if it shares blocks with others or has several ranks.

        Raises:
            SnapshotAbortedError: another rank has given it up.
            SnapshotExpiredError: gc has freed blocks that it shares.
        """
        sealed, base, is_alone = record.encode(), self._base.ulid if self._base is not None else None, self._stop is None
        (self.engine if is_alone else self._store).backend.put(record_name(txn), sealed)
        lead = PublishingLead(sealed, parts, self._accepts, base, self._links.txns, mark)
        self._write_manifest(request, lead)
        info = staged_info(txn, record)
        if is_alone and base is None:
            return info
        n = announce(self._store, lead, txn, request.ref)  # before it is acknowledged: gc could free shared blocks
        if n is None and not is_alone:
            raise SnapshotAbortedError(
                f"the save to {request.ref!r} was aborted by another rank before it was staged", object_id=request.ref
            )
        return info._replace(n=n or 0)

    def keep(self, info: SnapshotInfo, written: Sequence[WrittenPart]) -> None:
        """The next save builds on this one."""
        for each in written:
            self._store.keep_part(each.ulid, each.part)
        added = {block: location for part in written for block, location in part.added.items()}
        accepts = () if isinstance(self._accepts, AnyHead) else self._accepts
        self._chain.add(StagedLink(info.ulid, info.root, added, frozenset(self._names), accepts))

    def give_up(self) -> None:
        """Deletes what was written."""
        self._tier.folder.delete_manifest(manifest_key(self._txn, self._rank))
        self._tier.uploader.drop(self._writes.names)

    @property
    def _names(self) -> list[str]:
        """All objects that must be in the store before publishing, small ones first."""
        packs = [name for name in self._writes.names if name.startswith("packs/")]
        others = [name for name in self._writes.names if not name.startswith("packs/")]
        relied = sorted(set().union(*(known.packs for known in self._known)))
        return [*others, *relied, *packs]

    def _write_manifest(self, request: PutRequest, lead: PublishingLead | None) -> None:
        size = sum(self._tier.folder.unsent.size(name) for name in self._writes.names)
        manifest = Manifest(self._txn, request.ref, request.step, self._rank, self._ranks, self._names, size, lead)
        self._tier.folder.write_manifest(manifest.key, manifest.encode())
        self.manifest = manifest

    def _small(self) -> list[str]:
        """Parts, and the packs of the layout and large values."""
        names, size_of = self._writes.names, self._tier.folder.unsent.size
        return [
            *(name for name in names if not name.startswith("packs/")),
            *(name for name in names if name.startswith("packs/") and size_of(name) <= SMALL_BYTES),
        ]


def stage(
    engine: Engine,
    tier: StagingTier,
    captured: CapturedState,
    ask: Callable[[], tuple[PutRequest, bool]],
    *,
    chain: StagedChain,
    meter: PutMeter,
) -> StagedResult:
    """The first step of one process.

    `ask` returns the request, and whether the store does not answer. Then, or if the log entry cannot be appended in time, nothing is read
    from the store, and no block in it is relied on.

    Raises:
        ConflictError: the ref is not where it may be.
        StoreError: it cannot be written; nothing stays.
    """
    txn, links = engine.new_id(), chain.borrow()  # before the ref is looked up
    try:
        request, is_offline = ask()
        if not is_offline:
            with suppress(BackendUnavailableError, UndecidedError, SnapshotExpiredError):
                return _stage(StagingDestination(engine, tier, chain, links, txn), captured, request, txn, meter)
        # under the same transaction: a late log entry may still say that it was staged
        return _stage(StagingDestination(engine, tier, chain, links, txn, is_offline=True), captured, request, txn, meter)
    finally:
        chain.give_back(links)


def _stage(destination: StagingDestination, captured: CapturedState, request: PutRequest, txn: Ulid, meter: PutMeter) -> StagedResult:
    try:
        info = put_once(captured, request, meter, destination, txn)
    except BaseException as exc:
        if isinstance(exc, StoreError) or destination.manifest is None:
            destination.give_up()
        raise
    assert destination.manifest is not None
    return StagedResult(info, destination.manifest)


def base_of(view: RefTable, request: PutRequest) -> SnapshotInfo | None:
    """The published snapshot with which a save most likely shares blocks."""
    branch = view.branch(request.ref)
    for root in (request.nearest, branch.root if branch is not None else None):
        info = view.by_root(root) if root is not None else None
        if info is not None and view.is_live(info.ulid):
            return info
    return None


def staged_info(txn: Ulid, record: Record) -> SnapshotInfo:
    """A staged snapshot as if it were published."""
    sealed = object_hash(record.encode())
    at = (txn, record.root(), sealed, record.parent, record.ref, record.step, 0, record.time_ns)
    sizes = (record.logical_bytes, record.new_bytes)
    return SnapshotInfo(*at, record.metrics, *sizes, record.time_ns, record.triggers, record.epoch)

"""The first step of a staged put: packs, parts and record become durable on the staging disks, and nothing is visible yet.

What a put shares with published snapshots is looked for in one of them alone, the base, which the log's ``staged`` entry pins: so all
that it needs is on the disks, or stays in the store, however long the upload takes (docs/decisions/010-staged-snapshots-pin-one-base.md).
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
from tensorstore_ck.engine.reachability import revive
from tensorstore_ck.engine.write.dedup import DedupIndex
from tensorstore_ck.engine.write.part_writer import ALONE, BlockLookup, WrittenPart, write_part
from tensorstore_ck.engine.write.put import AnyHead, PutRequest, check_expected, is_expected
from tensorstore_ck.errors import (
    BackendUnavailableError,
    SnapshotAbortedError,
    SnapshotExpiredError,
    StoreError,
    UndecidedError,
)
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.format.sealed import Body, object_hash
from tensorstore_ck.log import Op, RefTable, SnapshotInfo
from tensorstore_ck.session.group.attempt import Round
from tensorstore_ck.session.group.group import Group
from tensorstore_ck.session.group.publish import checked_parts, record_of
from tensorstore_ck.session.group.put_plan import Memory
from tensorstore_ck.session.group.rank_put import PreparedPut, RankDone, RankPut
from tensorstore_ck.session.staging.manifest import Accepts, Manifest, PublishingLead, manifest_key
from tensorstore_ck.session.staging.staged_chain import ChainedBlocks, StagedChain, StagedLink, StagedLinks

SMALL_BYTES: Final = 16 << 20


class StagedResult(NamedTuple):
    """What the first step leaves to the second."""

    info: SnapshotInfo
    manifest: Manifest


def check_accepted(engine: Engine, view: RefTable, ref: str, accepts: Accepts) -> None:
    """The precondition of a staged put.

    Raises:
        ConflictError: the ref is nowhere where it may be.
    """
    branch, roots = view.branch(ref), (accepts,) if isinstance(accepts, AnyHead) else accepts
    check_expected(engine, view, ref, next((root for root in roots if is_expected(branch, root)), roots[-1]))


def owner_of(txn: Ulid) -> str:
    """Whose the pin on the base is."""
    return f"staged:{ulid_text(txn)}"


def pin_for(ref: str, txn: Ulid, root: Digest) -> Op:
    """Holds what a staged snapshot shares blocks with."""
    return Op.pin(root, owner_of(txn), f"a staged snapshot of {ref} shares its blocks", None)


def announce(engine: Engine, lead: PublishingLead, txn: Ulid, ref: str) -> int | None:
    """Has the log say that it is staged, with pins on what it shares: the number of that entry; None if it says already how it ended.

    Raises:
        SnapshotExpiredError: gc has freed something that it shares.
    """
    record = decode_record(lead.record, record_name(txn))

    def build(view: RefTable) -> list[Op]:
        if view.outcome(txn) is not None or view.staged(txn) is not None or view.snapshot(txn) is not None:
            return []
        if lead.pinned is not None and view.snapshot(lead.pinned) is None:
            raise SnapshotExpiredError(f"a staged snapshot of {ref!r} shares blocks with one that gc freed", object_id=ref)
        pins: list[Op] = []
        for shared in (lead.pinned, *lead.after):
            info = view.snapshot(shared) if shared is not None else None
            if info is not None:
                pins += [*revive(engine, view, info), pin_for(ref, txn, info.root)]
        return [Op.staged(ref, txn, record, lead.record, txn=txn), *pins]

    appended = engine.log.append(build)
    if appended.ops:
        return appended.n
    staged = engine.log.view().staged(txn)
    return staged.n if staged is not None else None


class Stager:
    """What one process stages of one put."""

    def __init__(self, engine: Engine, tier: StagingTier, links: StagedLinks) -> None:
        """`links` are what it builds on."""
        self._tier = tier
        self._links = links
        self._writes = StagingWriteBackend(tier.folder, engine.backend)
        self._known: list[ChainedBlocks] = []
        self.engine = replace(engine, backend=cast(Backend, self._writes), put_ids=None)
        """Writes to the staging disk. What lies there outlives this process, so gc must not take it for what a dead process left."""

    def known(self, base: SnapshotInfo | None, rank: int, ranks: int) -> BlockLookup:
        """Which blocks need not be written."""
        there = DedupIndex(self.engine, base.root, rank, ranks, elsewhere=False) if base is not None else None
        self._known.append(ChainedBlocks(self._links, there))
        return self._known[-1]

    @property
    def written(self) -> list[str]:
        """The objects that were written."""
        return self._writes.names

    @property
    def names(self) -> list[str]:
        """All objects that must be in the store in the end, small ones first."""
        packs = [name for name in self.written if name.startswith("packs/")]
        others = [name for name in self.written if not name.startswith("packs/")]
        relied = sorted(set().union(*(known.packs for known in self._known)))
        return [*others, *relied, *packs]

    def size_bytes(self) -> int:
        """Of what was written."""
        return sum(self._tier.folder.unsent.size(name) for name in self.written)

    def keep(self, manifest: Manifest) -> None:
        """Writes the manifest: from here on a crash loses nothing."""
        self._tier.folder.write_manifest(manifest.key, manifest.encode())

    def give_up(self) -> None:
        """Deletes what was written."""
        self._tier.folder.unsent.delete(self.written)

    def link(self, info: SnapshotInfo, written: Sequence[WrittenPart], accepts: Accepts) -> StagedLink:
        """For the next put, which builds on this one."""
        added = {block: place for part in written for block, place in part.added.items()}
        return StagedLink(info.ulid, info.root, added, frozenset(self.names), () if isinstance(accepts, AnyHead) else accepts)


def stage_alone(
    engine: Engine,
    tier: StagingTier,
    captured: CapturedState,
    ask: Callable[[], tuple[PutRequest, bool]],
    *,
    chain: StagedChain,
    meter: PutMeter,
) -> StagedResult:
    """The first step of one process.

    `ask` says what is put, and whether the store does not answer: then it is not asked for anything, and nothing of it relied on. Nor
    where the log cannot be told in time of what is relied on.

    Raises:
        ConflictError: the ref is not where it may be.
        StoreError: it cannot be written; nothing of it stays.
    """
    txn, links = engine.new_id(), chain.borrow()
    try:
        request, offline = ask()
        staged: tuple[StagedResult, StagedLink] | None = None
        if not offline:
            with suppress(BackendUnavailableError, UndecidedError, SnapshotExpiredError):
                staged = _stage_alone(engine, tier, captured, request, txn, links=links, meter=meter, offline=False)
        if staged is None:  # under the same transaction: the log may still come to say that it was staged
            staged = _stage_alone(engine, tier, captured, request, txn, links=links, meter=meter, offline=True)
        chain.add(staged[1])
        return staged[0]
    finally:
        chain.give_back(links)


def _stage_alone(
    engine: Engine,
    tier: StagingTier,
    captured: CapturedState,
    request: PutRequest,
    txn: Ulid,
    *,
    links: StagedLinks,
    meter: PutMeter,
    offline: bool,
) -> tuple[StagedResult, StagedLink]:
    stager = Stager(engine, tier, links)
    view, accepts = engine.log.view(), links.accepts(request.expect)
    check_accepted(engine, view, request.ref, accepts)
    head, base = view.head(), None if offline else base_of(view, request)
    anchor = head.n if head else 0
    try:
        seat = ALONE._replace(layout_of=b"") if captured.explicit else ALONE
        written = write_part(
            stager.engine,
            captured,
            stager.known(base, 0, 1),
            anchor=anchor,
            seat=seat,
            coding=request.coding,
            meter=meter,
            sampling=request.sampling,
        )
        if offline:  # nothing is compared with what may have to be read from the store
            request = request.noted(written.tensors.sample.finiteness)
        else:
            request = request.judged(engine, request.examine(engine, written, captured))
        parts = [checked_parts(stager.engine, [written], anchor, sync=not offline)]
        record = record_of(engine, request, parts, logical_bytes=captured.logical_bytes)
        stager.engine.backend.put(record_name(txn), record.encode())
        lead = PublishingLead(record.encode(), parts, accepts, base.ulid if base is not None else None, links.txns, None)
        manifest = Manifest(txn, request.ref, request.step, 0, 1, stager.names, stager.size_bytes(), lead)
        stager.keep(manifest)
    except BaseException:
        stager.give_up()
        raise
    if base is not None:
        try:
            announce(engine, lead, txn, request.ref)  # before it is acknowledged: gc could free what it shares
        except StoreError:
            tier.folder.delete_manifest(manifest.key)
            stager.give_up()
            raise
    info = staged_info(txn, record)
    engine.keep_part(written.ulid, written.part)
    return StagedResult(info, manifest), stager.link(info, [written], accepts)


class StagedRankPut(RankPut):
    """One rank's side of the first step of many; rank 0 has the log say "staged" where it would say "put"."""

    operation = "staged"
    apart = True

    def __init__(
        self,
        engine: Engine,
        group: Group,
        prepare: Callable[[], PreparedPut],
        *,
        attempt: Round,
        memory: Memory,
        meter: PutMeter,
        tier: StagingTier,
        chain: StagedChain,
        stop: Callable[[], None],
    ) -> None:
        super().__init__(engine, group, prepare, attempt=attempt, memory=memory, meter=meter)
        self._store_engine = engine
        self._tier = tier
        self._chain = chain
        self._links = chain.borrow()
        self._stop = stop
        self._stager = Stager(engine, tier, self._links)
        self._base: SnapshotInfo | None = None
        self._manifest: Manifest
        self._accepts: Accepts = ()

    def hello(self) -> Body:
        """See `RankPut`. Where the ref may be is rank 0's to say: others may not know yet what has become of the puts before."""
        record = super().hello()
        self._accepts = self._links.accepts(self._request.expect)
        if self._group.rank == 0:
            check_accepted(self._store_engine, self._store_engine.log.view(), self._request.ref, self._accepts)
        return record | {"expect": None}

    def work(self, go: Body) -> Body:
        """Stages this rank's side; what others need to open the snapshot goes to the store at once: it is small."""
        if go["explain"]:
            return super().work(go)
        self._engine = self._stager.engine
        self._store_engine.log.sync()
        self.follow(go)
        self._base = base_of(self._store_engine.log.view(), self._request)
        record = super().work(go)
        request, stager, group = self._request, self._stager, self._group
        self._tier.uploader.upload(self._small(), stop=self._stop)
        self._manifest = Manifest(self._txn, request.ref, request.step, group.rank, group.ranks, stager.names, stager.size_bytes(), None)
        stager.keep(self._manifest)
        return record

    def settle(self, reason: str) -> Body | None:
        """The outcome is what the log says first: staged, or aborted."""
        log = self._store_engine.log
        log.append(lambda view: [] if view.outcome(self._txn) or view.staged(self._txn) else [Op.abort(self._txn)])
        found = log.view().staged(self._txn)
        return None if found is None else self._outcome(found.n)

    def finish(self, outcome: Body) -> StagedResult:
        """What is left to the second step."""
        info = self.published(outcome)
        for written in self._written:
            self._store_engine.keep_part(written.ulid, written.part)
        self._chain.add(self._stager.link(info, self._written, self._accepts))
        self._chain.give_back(self._links)
        self.keep_drifted(self._store_engine, info, outcome)
        return StagedResult(info, self._manifest)

    def give_up(self) -> None:
        """Deletes what was written."""
        self._chain.give_back(self._links)
        self._tier.folder.delete_manifest(manifest_key(self._txn, self._group.rank))
        self._tier.uploader.drop(self._stager.written)

    def _known(self, number: int) -> BlockLookup:
        return self._stager.known(self._base, number, self._group.ranks)

    def _append(self, dones: Sequence[RankDone], drifted: Sequence[tuple[int, int]]) -> int:
        engine, request, record = self._store_engine, self._request, self._record(dones)
        sealed, parts = record.encode(), [done.parts for done in dones]
        engine.backend.put(record_name(self._txn), sealed)
        base = self._base.ulid if self._base is not None else None
        lead = PublishingLead(sealed, parts, self._accepts, base, self._links.txns, self._mark(drifted))
        self._manifest = self._manifest._replace(lead=lead)
        self._stager.keep(self._manifest)
        n = announce(engine, lead, self._txn, request.ref)
        if n is None:
            raise SnapshotAbortedError(
                f"the put to {request.ref!r} was aborted by another rank before it was staged", object_id=request.ref
            )
        return n

    def _small(self) -> list[str]:
        """Parts, and the packs of the layout and large values."""
        packs = [name for name in self._stager.written if name.startswith("packs/")]
        size_of = self._tier.folder.unsent.size
        return [
            *(name for name in self._stager.written if not name.startswith("packs/")),
            *(name for name in packs if size_of(name) <= SMALL_BYTES),
        ]


def base_of(view: RefTable, request: PutRequest) -> SnapshotInfo | None:
    """The published snapshot that a put most likely shares blocks with."""
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
    return SnapshotInfo(*at, record.metrics, "", "", record.logical_bytes, record.new_bytes)

"""The second step of a staged save: its objects are brought into the store, and then one log entry publishes it.

Nothing is lost by trying again: uploads go on where they were, and of several entries that would publish one staged snapshot the first
counts. Passing faults are waited out. What can never be published any more is given up, which the log says.
"""

from collections.abc import Iterable

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.publish import moving, publish
from tensorstore_ck.engine.write.rank_parts import condemned_of_ranks
from tensorstore_ck.errors import MissingObjectError
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.log import Op, RefTable, SnapshotInfo
from tensorstore_ck.session.staging.manifest import Manifest, PublishingLead, read_manifests
from tensorstore_ck.session.staging.stage import check_accepted, owner_of, pin_for


def publish_staged(engine: Engine, lead: PublishingLead, txn: Ulid, attempt: Ulid, ref: str) -> SnapshotInfo:
    """Publishes a staged snapshot whose objects are in the store; if another process did, returns that.

    Args:
        engine: The store.
        lead: What was staged.
        txn: Under which transaction.
        attempt: The transaction of this try: one that was given up never publishes.
        ref: The branch.

    Raises:
        ConflictError: the ref is nowhere where it may be.
        SnapshotAbortedError: this try, or the staged snapshot itself, was given up.
        SnapshotExpiredError: gc freed something that it relies on.
    """
    record = decode_record(lead.record, record_name(txn))

    def arrange(view: RefTable, put: Op) -> list[Op]:
        staged = view.staged(txn)
        if staged is None:
            return []
        check_accepted(engine, view, ref, lead.accepts)
        later = [other for other, info in view.all_staged() if info.ref == ref and info.n > staged.n]
        pins = [pin_for(ref, other, record.root()) for other in later]  # they may share its blocks
        return [*moving(engine, view, put, record, lead.mark), *_unpin(view, txn), *pins]

    return publish(
        engine,
        record,
        lead.record,
        txn=attempt,
        staged=txn,
        anchor=min(rank.anchor for rank in lead.parts),
        arrange=arrange,
        condemned=lambda view: condemned_of_ranks(engine, view, txn, lead.parts),
    )


def give_up(engine: Engine, txn: Ulid) -> SnapshotInfo | None:
    """Has the log say that a staged snapshot will not be published; unless it was, which is returned."""

    def build(view: RefTable) -> list[Op]:
        if view.snapshot(txn) is not None or view.outcome(txn) is not None:
            return []
        return [Op.abort(txn), *_unpin(view, txn)]

    return engine.log.published(engine.log.append(build), txn)


def clean_up(tier: StagingTier, manifest: Manifest, *, published: bool, needed: Iterable[str] = ()) -> None:
    """Lets go of what was staged: what the store has becomes a copy, what nobody needs any more is deleted.

    `needed`: the objects that other staged snapshots name.
    """
    if published:
        tier.folder.publish(manifest.names)
    else:
        kept = set(needed)
        tier.uploader.drop(name for name in manifest.names if name not in kept and _is_unsent(tier, name))
    tier.folder.delete_manifest(manifest.key)


def drop(engine: Engine, tier: StagingTier | None, txn: Ulid) -> SnapshotInfo | None:
    """Gives a staged snapshot up, and frees what this disk has of it; unless it was published, which is returned."""
    published = give_up(engine, txn)
    if tier is not None:
        manifests, damaged = read_manifests(tier.folder)
        needed = {name for manifest in manifests if manifest.txn != txn for name in manifest.names}
        for manifest in manifests:
            if manifest.txn == txn:
                clean_up(tier, manifest, published=published is not None, needed=needed)
        for key in damaged:
            if key.startswith(ulid_text(txn)):
                tier.folder.delete_manifest(key)
    return published


def _is_unsent(tier: StagingTier, name: str) -> bool:
    try:
        tier.folder.unsent.size(name)
    except MissingObjectError:
        return False
    return True


def _unpin(view: RefTable, txn: Ulid) -> list[Op]:
    owner = owner_of(txn)
    return [Op.unpin(pin.ulid, owner, view) for pin in view.pins() if pin.owner == owner]

"""The second step of a staged save: after its objects are uploaded, one log entry publishes it.

It may be tried again: uploads continue, and of several entries that publish one staged snapshot the first counts. A save that can never be
published is given up, in the log.
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
    """Publishes a staged snapshot whose objects are in the store; if another process has published it, returns that.

    Args:
        engine: The store.
        lead: What was staged.
        txn: The transaction of the staging.
        attempt: The transaction of this attempt: one that was aborted never publishes.
        ref: The branch.

    Raises:
        ConflictError: the ref is not where it may be.
        SnapshotAbortedError: this attempt, or the staged snapshot itself, was given up.
        SnapshotExpiredError: gc freed blocks that it relies on.
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
    """Notes in the log that a staged snapshot will not be published; returns the snapshot if it already was."""

    def build(view: RefTable) -> list[Op]:
        if view.snapshot(txn) is not None or view.outcome(txn) is not None:
            return []
        return [Op.abort(txn), *_unpin(view, txn)]

    return engine.log.published(engine.log.append(build), txn)


def clean_up(tier: StagingTier, manifest: Manifest, *, published: bool, needed: Iterable[str] = ()) -> None:
    """Frees a staging disk: published objects become copies, unneeded ones and the manifest are deleted.

    `needed`: the objects that other staged snapshots name.
    """
    if published:
        tier.folder.publish(manifest.names)
    else:
        kept = set(needed)
        tier.uploader.drop(name for name in manifest.names if name not in kept and _is_unsent(tier, name))
    tier.folder.delete_manifest(manifest.key)


def drop(engine: Engine, tier: StagingTier | None, txn: Ulid) -> SnapshotInfo | None:
    """Gives a staged snapshot up, and frees this disk; returns the snapshot if it was published."""
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

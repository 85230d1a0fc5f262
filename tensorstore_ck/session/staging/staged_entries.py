"""The log entries of a staged save: that it is staged, that it is published once its objects are uploaded, or that it is given up.

Publishing may be tried again, by several processes: uploads continue, and of several entries that publish one staged snapshot the first
counts. A save that can never be published is given up, in the log.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter

from tensorstore_ck.backend.staging import StagingTier
from tensorstore_ck.common.ids import Digest, Ulid, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import rescue_if_expired
from tensorstore_ck.engine.write.publish import (
    RankParts,
    condemned_of_ranks,
    in_record_order,
    move_operations,
    publish,
)
from tensorstore_ck.errors import SnapshotAbortedError, SnapshotExpiredError
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.log import Op, RefTable, SnapshotRow
from tensorstore_ck.session.staging.manifest import Manifest, PublishingLead, read_manifests
from tensorstore_ck.session.staging.outcome import published_as


def owner_of(txn: Ulid) -> str:
    """The owner of the pin on the base."""
    return f"staged:{ulid_text(txn)}"


def pin_for(ref: str, txn: Ulid, root: Digest) -> Op:
    """Pins a snapshot with which a staged one shares blocks."""
    return Op.pin(root, owner_of(txn), f"a staged snapshot of {ref} shares its blocks", None)


def announce(engine: Engine, lead: PublishingLead, txn: Ulid, ref: str, *, at: RefTable | None = None) -> int | None:
    """Appends to the log that a save is staged, with pins on the snapshots with which it shares blocks.

    Returns the entry's number; None if the log has the save's outcome. `at`: see `Log.append`.

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

    appended = engine.log.append(build, at=at)
    if appended.ops:
        return appended.n
    staged = engine.log.view().staged(txn)
    return staged.n if staged is not None else None


def publish_staged(
    engine: Engine, lead: PublishingLead, txn: Ulid, attempt: Ulid, ref: str, *, renewed: Sequence[RankParts] | None = None
) -> SnapshotRow:
    """Publishes a staged snapshot whose objects are in the store. If another process has published it, returns that snapshot.

    `txn`: the transaction of the staging. `attempt`: that of this attempt: one that was aborted never publishes. `renewed`: the parts of
    all ranks, if some have new names: then the record gets one, too.

    Raises:
        ConflictError: the ref is not where it may be.
        SnapshotAbortedError: this attempt, or the staged snapshot itself, was given up.
        SnapshotExpiredError: gc freed blocks that it relies on.
    """
    record, parts, snapshot = decode_record(lead.record, record_name(txn)), lead.parts, txn
    if renewed is not None:
        record, parts, snapshot = record._replace(parts=in_record_order(map(attrgetter("ulids"), renewed))), renewed, engine.put_id()

    def arrange(view: RefTable, put: Op) -> list[Op]:
        staged = view.staged(txn)
        if staged is None:
            return []
        moves = move_operations(engine, record, view, put, expect=lead.accepts, mark=lead.mark)
        later = [other for other, info in view.all_staged() if info.ref == ref and info.n > staged.n]
        pins = [pin_for(ref, other, record.root()) for other in later]  # they may share its blocks
        if renewed is not None and lead.pinned is not None and not view.is_live(lead.pinned):
            raise SnapshotExpiredError(f"the staged snapshot of {ref!r} shares blocks with one that gc freed", object_id=ref)
        ended = [Op.abort(txn)] if renewed is not None else []
        return [*moves, *ended, *_unpin(view, txn), *pins]

    try:
        return publish(
            engine,
            record,
            txn=attempt,
            staged=txn,
            snapshot=snapshot,
            stored=lead.record if renewed is None else None,
            anchor=min(rank.anchor for rank in parts),
            arrange=arrange,
            condemned=partial(condemned_of_ranks, engine, snapshot, parts),
        )
    except SnapshotAbortedError:
        published = published_as(engine, engine.log.view(), txn)
        if published is None:
            raise
        return published


def give_up(engine: Engine, txn: Ulid) -> SnapshotRow | None:
    """Notes in the log that a staged snapshot will not be published; returns the snapshot if it already was."""

    def build(view: RefTable) -> list[Op]:
        if view.snapshot(txn) is not None or view.outcome(txn) is not None:
            return []
        return [Op.abort(txn), *_unpin(view, txn)]

    published = engine.log.published(engine.log.append(build), txn)
    return published if published is not None else published_as(engine, engine.log.view(), txn)


def clean_up(tier: StagingTier, manifest: Manifest, *, published: bool, needed: Iterable[str] = ()) -> None:
    """Frees the space of one save on a staging disk, once it is published, or given up in the log.

    Published objects become copies; unneeded ones and the manifest are deleted. Objects that other staged saves need stay: their manifests,
    or `needed`, name them. After a renewal the store has them under other names than those saves know.
    """
    renewed = {name for name in manifest.names if (entry := tier.folder.journal.read(name)) is not None and entry.stored_as}
    kept: set[str] = set()
    if renewed or not published:
        others, _ = read_manifests(tier.folder)
        kept = set(needed).union(*(other.names for other in others if other.txn != manifest.txn))
    if published:
        tier.folder.publish(name for name in manifest.names if name not in renewed & kept)
    else:
        tier.uploader.drop(name for name in manifest.names if name not in kept and tier.folder.has_unsent(name))
    tier.folder.delete_manifest(manifest.key)


def drop(engine: Engine, tier: StagingTier | None, txn: Ulid) -> SnapshotRow | None:
    """Gives a staged snapshot up, and frees this disk; returns the snapshot if it was published."""
    published = give_up(engine, txn)
    if tier is not None:
        manifests, damaged = read_manifests(tier.folder)
        for manifest in manifests:
            if manifest.txn == txn:
                clean_up(tier, manifest, published=published is not None)
        for key in damaged:
            if key.startswith(ulid_text(txn)):
                tier.folder.delete_manifest(key)
    return published


def _unpin(view: RefTable, txn: Ulid) -> list[Op]:
    owner = owner_of(txn)
    return [Op.unpin(pin.ulid, owner, view) for pin in view.pins() if pin.owner == owner]

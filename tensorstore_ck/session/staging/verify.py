"""Verifies a save that another user staged, before it is uploaded: its content against the root, and its names against the store.

A process trusts what it staged itself; root, who publishes for another user, does not.
"""

from collections.abc import Callable, Sequence
from typing import Final

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.staging import StagingFolder, StagingTier
from tensorstore_ck.backend.staging.upload_journal import JournalEntry
from tensorstore_ck.common.ids import ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.engine.reachability import locate_blocks
from tensorstore_ck.engine.read.block_reader import OpenPart, read_at_places, wanted_blocks
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.sealed import object_hash
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.session.staging.manifest import Manifest

_PIECE_BYTES: Final = 4 << 20


def verify_staged(
    engine: Engine, tier: StagingTier, manifests: Sequence[Manifest], require_intact: Callable[[Engine, SnapshotRow], None]
) -> None:
    """Reads all staged objects of a snapshot, by the `manifests` of all its ranks. Its uploads start again.

    `require_intact` checks the structure of the snapshot, as `maintenance.fsck.require_intact`.

    Raises:
        StoreError: it does not match its root, or the store has another object under one of its names.
    """
    first = manifests[0]
    assert first.lead is not None
    record = decode_record(first.lead.record, record_name(first.txn))
    info, what = SnapshotRow.of_record(first.txn, record, record.encode()), f"the manifest of {ulid_text(first.txn)}"
    announced = engine.log.view().staged(first.txn)
    is_announced = announced is None or (announced.root, announced.record) == (info.root, info.record)
    if object_hash(first.lead.record) != info.record or not is_announced:
        text = f"{what} does not have the record of the snapshot that was staged: it was exchanged"
        raise CorruptObjectError(text, object_id=record_name(first.txn))
    if {manifest.ref for manifest in manifests} | {info.ref if announced is None else announced.ref} != {info.ref}:
        text = f"{what} names another branch than {info.ref!r}, for which it was staged"
        raise CorruptObjectError(text, object_id=info.ref)
    names = {name for manifest in manifests for name in manifest.names}
    own = {record_name(first.txn), *map(part_name, record.parts)}
    strange = sorted(name for name in names - own if not name.startswith("packs/"))
    if strange:
        raise CorruptObjectError(f"{what} names {strange[0]}, which is of another snapshot", object_id=strange[0])
    require_intact(engine, info)
    for rank, ulid in enumerate(record.parts):
        part = engine.read_part(record, rank)
        source = OpenPart(part, part_name(ulid), locate_blocks(engine, engine.log.view(), part), lambda _: "a staged snapshot")
        wanted = wanted_blocks(source, range(part.block_count), 0, _Nowhere())
        read_at_places(engine, [block for block in wanted if pack_name(block.pack) in names])
    for name in sorted(names):
        _restart_upload(tier.folder, tier.backend.store, name)


class _Nowhere(ByteTarget):
    """A `ByteTarget` that drops verified bytes."""

    def memory(self) -> None:
        """Returns None: there is no memory to fill."""

    def write(self, start: int, data: memoryview) -> None:
        """Does nothing."""


def _restart_upload(folder: StagingFolder, store: Backend, name: str) -> None:
    """Forgets the upload journal of an object, which another user wrote: uploads continue by it, and delete torn objects."""
    try:
        size_bytes, stored_bytes = folder.unsent.size(name), store.size(name)
    except MissingObjectError:  # the object is in one of the folders only
        folder.journal.delete([name])
        return
    pieces = (range(at, min(at + _PIECE_BYTES, size_bytes)) for at in range(0, size_bytes, _PIECE_BYTES))
    if size_bytes != stored_bytes or any(_read(folder.unsent, name, piece) != _read(store, name, piece) for piece in pieces):
        raise CorruptObjectError(
            f"the store has {name} already, with other bytes than the staged object of that name: drop the staged save", object_id=name
        )
    folder.journal.write(JournalEntry(name, is_complete=True))


def _read(backend: Backend, name: str, piece: range) -> bytearray:
    data = bytearray(len(piece))
    backend.read_into(name, piece.start, memoryview(data))
    return data

"""New names for staged objects whose old names cannot be used: gc freed what had been uploaded, or the store has other bytes there.

A pack does not contain its name: its file is uploaded under another one, which the upload journal keeps. A part names the packs of its
blocks, and a record names its parts: both are written again, directly to the store. Content, block ids, part ids and the root stay the
same, so the branch gets the snapshot that was saved. Its log entry ends the staging and aborts the old transaction, whose record is never
published.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.backend.staging.upload_journal import JournalEntry
from tensorstore_ck.common.ids import Ulid, parse_ulid, split_ulids
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.write.publish import RankParts, condemned_of, read_part
from tensorstore_ck.errors import CorruptObjectError, SnapshotExpiredError
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import part_name
from tensorstore_ck.format.record import record_name
from tensorstore_ck.format.sealed import FOLDERS, Body, take, take_count
from tensorstore_ck.log import ObjectKey, Objects, RefTable
from tensorstore_ck.session.staging.manifest import Manifest, PublishingLead

_KINDS: Final = {folder: kind for kind, folder in FOLDERS.items()}


class RenewedParts(NamedTuple):
    """The parts of one rank, under new names."""

    names: Mapping[Ulid, Ulid]
    """Old -> new."""
    anchor: int
    condemned: Objects
    """The objects that they need and that were condemned at the anchor."""

    def record(self) -> Body:
        """The record that is sent to other ranks."""
        pairs = b"".join(old + new for old, new in self.names.items())
        return {"names": pairs, "anchor": self.anchor, "condemned": self.condemned.fields()}

    @classmethod
    def of_record(cls, body: Body) -> "RenewedParts":
        """The parts that `record` encoded.

        Raises:
            TypeError, ValueError: it is malformed.
        """
        ulids = split_ulids(take(body, "names", bytes))
        names = dict(zip(ulids[::2], ulids[1::2], strict=True))
        return cls(names, take_count(body, "anchor"), Objects.of_fields(take(body, "condemned", dict)))

    def applied(self, rank: RankParts) -> RankParts:
        """The rank's report with the new names."""
        ulids = [self.names.get(ulid, ulid) for ulid in rank.ulids]
        return rank._replace(ulids=ulids, anchor=self.anchor, checked=self.anchor, condemned=self.condemned)


def draw_names(engine: Engine, folder: StagingFolder, manifest: Manifest, *, taken: Collection[str], anchor: int) -> bool:
    """Draws new names for the packs on this disk that cannot be published under their old names; returns whether the save must be renewed.

    `folder` keeps the names. `taken`: the objects whose name in the store has other bytes. `anchor`: the entry at which the rank chose
    blocks to rely on. Below the horizon the log no longer says what gc freed, so nothing that may have been uploaded is relied on.
    """
    view = engine.log.view()
    is_forgotten = anchor < view.horizon()
    is_renewed = is_forgotten or _is_freed(view, record_name(manifest.txn))
    for name in manifest.names:
        entry = folder.journal.read(name)
        is_lost = name in taken or _is_freed(view, name if entry is None else entry.store_name) or (is_forgotten and entry is not None)
        if is_lost and name.startswith("packs/") and folder.has_unsent(name):
            folder.note(JournalEntry(name, stored_as=pack_name(engine.new_id())))
        is_renewed |= is_lost or bool(entry is not None and entry.stored_as)
    return is_renewed


def anchor_of(engine: Engine, manifest: Manifest) -> int:
    """The entry at which a rank, or the oldest of all ranks, chose blocks to rely on."""
    if manifest.lead is not None:
        return min(rank.anchor for rank in manifest.lead.parts)
    return min((read_part(engine, ulid).anchor for ulid in _parts(manifest)), default=0)


def write_parts(engine: Engine, folder: StagingFolder, manifests: Sequence[Manifest]) -> RenewedParts:
    """Writes the parts of these manifests to the store again, once their packs are there.

    Raises:
        SnapshotExpiredError: gc freed a pack that they need, or another process is uploading it under yet another name.
    """
    head, view = engine.log.sync(), engine.log.view()
    anchor = head.n if head is not None else 0
    names: dict[Ulid, Ulid] = {}
    written = []
    for ulid in (ulid for manifest in manifests for ulid in _parts(manifest)):
        part = read_part(engine, ulid)
        part = part._replace(packs=[_stored(folder, pack) for pack in part.packs], anchor=anchor)
        names[ulid] = engine.put_id()
        engine.backend.put(part_name(names[ulid]), part.encode())
        written.append((names[ulid], part))
    return RenewedParts(names, anchor, condemned_of(engine, view, (), written) if written else Objects())


def is_lost(engine: Engine, folder: StagingFolder, manifests: Sequence[Manifest], lead: PublishingLead | None) -> bool:
    """Whether blocks that the save needs are neither on this disk nor kept by the store."""
    view = engine.log.view()
    if lead is not None and lead.pinned is not None and not view.is_live(lead.pinned):
        return True
    packs = {name for manifest in manifests for name in manifest.names if name.startswith("packs/")}
    return any(_is_freed(view, name) and not folder.has_unsent(name) for name in packs)


def _parts(manifest: Manifest) -> list[Ulid]:
    return [key.ulid for name in manifest.names if (key := _key(name)).kind == "part"]


def _stored(folder: StagingFolder, pack: Ulid) -> Ulid:
    entry = folder.journal.read(pack_name(pack))
    if entry is None or not entry.stored_as:
        return pack
    if not entry.is_complete:
        raise SnapshotExpiredError(f"the staged {entry.name} is not completely in the store as {entry.stored_as}", object_id=entry.name)
    return _key(entry.stored_as).ulid


def _is_freed(view: RefTable, name: str) -> bool:
    state = view.object_state(_key(name))
    return state is not None and bool(state.swept)


def _key(name: str) -> ObjectKey:
    ulid = parse_ulid(name.rpartition("/")[2])
    if ulid is None:
        raise CorruptObjectError(f"{name!r} is not the name of a staged object", object_id=name)
    return ObjectKey(_KINDS[name.partition("/")[0]], ulid)

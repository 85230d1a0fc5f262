"""Rebuilds lost parts and records: content from another object of the same logical hash, block locations from this store.

A rebuilt part must not refer to a pack just because that pack is listed. So it refers to a pack that never existed, and a relocation,
checked and committed like any other, leads from there to blocks that live snapshots need, or that were copied for it. The part gets a
new name, since hosts cache what a part needs by its name, and the rebuilt record names it. The relocation comes last: its entry rescues
what a gc condemned without seeing the new record, and a later gc marks again because it sees the relocation.
An object in a copy of this same store is copied unchanged, if gc has condemned or swept nothing that it refers to.
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final

import numpy as np

from tensorstore_ck.backend.protocol import finishing
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import locate_blocks
from tensorstore_ck.engine.write.pack_writer import EncodedBlock, PackWriter
from tensorstore_ck.errors import DamageError, MissingObjectError
from tensorstore_ck.format.codec import CODECS_WITH_BASES
from tensorstore_ck.format.pack import HEADER
from tensorstore_ck.format.part import EXTENT_DTYPE, Part, decode_part, encode_values, part_name
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES, object_hash, unseal
from tensorstore_ck.gc.compact import CompactedPack, write_relocation
from tensorstore_ck.log import ObjectKey, SnapshotRow
from tensorstore_ck.log.block_index import Location
from tensorstore_ck.maintenance.fsck.check_packs import BlockCopy, Packs, find_copies
from tensorstore_ck.maintenance.fsck.check_snapshot import rebuilt_record
from tensorstore_ck.maintenance.fsck.good_copies import BlockSource, OtherStore
from tensorstore_ck.maintenance.fsck.rebuild_packs import commit_relocation
from tensorstore_ck.maintenance.fsck.repairable import readable_parts

COPIED: Final = "copied from the other store"


@dataclass(eq=False, repr=False)
class PartRebuilder:
    """Rebuilds parts and records of one store."""

    engine: Engine
    packs: Packs
    listed: Mapping[str, Collection[Ulid]]
    """Objects by kind."""
    other: OtherStore | None
    safe: frozenset[Ulid]
    """Packs that live snapshots need as of entry `anchor`."""
    anchor: int
    _hashes: dict[str, dict[Digest, str]] = field(default_factory=dict, init=False)
    _parts_by_id: dict[tuple[Digest, int], tuple[Engine, Ulid]] | None = field(default=None, init=False)

    def record(self, info: SnapshotRow) -> str | None:
        """Rebuilds a record; returns how, or None if no source has it.

        Raises:
            SnapshotExpiredError: gc freed something meanwhile: check again.
            DamageError: a block has no good copy.
        """
        name, theirs = record_name(info.ulid), None
        exact = self.exact(ObjectKey("snapshot", info.ulid), info.record)
        if exact is not None:
            with contextlib.suppress(DamageError):
                record = decode_record(exact[0], name)
                if not self._is_listed(ObjectKey("part", part) for part in record.parts):
                    self.overwrite(ObjectKey("snapshot", info.ulid), exact[0])
                    return exact[1]
        with contextlib.suppress(DamageError):
            theirs = self._their_record(info)
        if theirs is None or not all(self._find_part(theirs.part_id(rank), rank) for rank in range(len(theirs.parts))):
            return None
        rebuilt = []
        for rank in range(len(theirs.parts)):
            part = self._logical_part(theirs.part_id(rank), rank)
            if part is None:
                return None
            rebuilt.append(self._write_part(part))
        self._publish(info, rebuilt_record(info, theirs, [ulid for ulid, _ in rebuilt]), rebuilt)
        return "rebuilt from the other store's record with the same root"

    def part(self, ulid: Ulid, rank: int, record: Record, info: SnapshotRow) -> str | None:
        """Rebuilds a part; returns how, or None if no source has it. Raises the same errors as `record`."""
        wanted, name = record.part_id(rank), part_name(ulid)
        with contextlib.suppress(DamageError):
            data = self._from_copy(name)
            part = decode_part(data, name)
            objects = set(locate_blocks(self.engine, self.engine.log.view(), part).objects())
            is_here = all(key.kind != "pack" or key.ulid in self.packs.listed for key in objects)
            if part.part_id() == wanted and is_here and not self._is_listed(objects):
                self.overwrite(ObjectKey("part", ulid), data)
                return COPIED
        content = self._logical_part(wanted, rank) or self._empty_part(wanted, rank, record)
        if content is None:
            return None
        rebuilt = self._write_part(content)
        parts = [*record.parts[:rank], rebuilt[0], *record.parts[rank + 1 :]]
        self._publish(info, rebuilt_record(info, record, parts), [rebuilt])
        return "rebuilt from a part with the same content"

    def exact(self, key: ObjectKey, expected: Digest) -> tuple[bytes, str] | None:
        """The object from the other store, or one with the same hash under another name here; and where it was."""
        own = self._names_by_hash(key.kind).get(expected, key.name)
        sources = [(self.engine, own, f"copied from {own}")]
        if self.other is not None:
            sources.insert(0, (self.other.engine, key.name, COPIED))
        for engine, name, how in sources:
            with contextlib.suppress(DamageError):
                data = engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
                unseal(key.kind, data, name)
                if object_hash(data) == expected:
                    return data, how
        return None

    def overwrite(self, key: ObjectKey, data: bytes) -> None:
        """Replaces a damaged object. If a sound object was there under the wrong name, it is kept under a new name."""
        with contextlib.suppress(DamageError):
            there = self.engine.backend.get(key.name, max_bytes=MAX_OBJECT_BYTES)
            if _identity(key.kind, there) != _identity(key.kind, data):
                kept = ObjectKey(key.kind, self.engine.new_id())
                self.engine.backend.put(kept.name, there)
                self._names_by_hash(key.kind)[object_hash(there)] = kept.name
                if key.kind == "part" and self._parts_by_id is not None:
                    part = decode_part(there, kept.name)
                    self._parts_by_id[part.part_id(), part.rank] = self.engine, kept.ulid
        self.engine.backend.replace(key.name, data)

    def _names_by_hash(self, kind: str) -> dict[Digest, str]:
        """Hash of each object of this store -> its name."""
        if kind not in self._hashes:
            names = self._hashes.setdefault(kind, {})
            for ulid in self.listed[kind]:
                name = ObjectKey(kind, ulid).name
                with contextlib.suppress(DamageError):
                    names[object_hash(self.engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES))] = name
        return self._hashes[kind]

    def _is_listed(self, objects: Iterable[ObjectKey]) -> bool:
        """Whether gc condemned or swept any of them."""
        view = self.engine.log.view()
        return any(view.object_state(key) is not None for key in objects)

    def _from_copy(self, name: str) -> bytes:
        if self.other is None:
            raise MissingObjectError(f"there is no other store to copy {name} from", object_id=name)
        return self.other.engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)

    def _their_record(self, info: SnapshotRow) -> Record | None:
        other = self.other
        theirs = other.engine.log.view().by_root(info.root) if other is not None else None
        return other.engine.read_record(theirs) if other is not None and theirs is not None else None

    def _find_part(self, wanted: Digest, rank: int) -> tuple[Engine, Ulid] | None:
        """A part with that id, in this store, else in the other."""
        if self._parts_by_id is None:
            self._parts_by_id = {}
            stores = [
                (self.engine, sorted(self.listed["part"])),
                *([(self.other.engine, self.other.parts)] if self.other is not None else []),
            ]
            for engine, parts in stores:
                for ulid, part in readable_parts(engine, parts):
                    self._parts_by_id.setdefault((part.part_id(), part.rank), (engine, ulid))
        return self._parts_by_id.get((wanted, rank))

    def _logical_part(self, wanted: Digest, rank: int) -> Part | None:
        source = self._find_part(wanted, rank)
        return next((part for _, part in readable_parts(source[0], [source[1]])), None) if source is not None else None

    def _empty_part(self, wanted: Digest, rank: int, record: Record) -> Part | None:
        """A part with that id if the rank had nothing to store: built from another rank's part."""
        for other, ulid in enumerate(record.parts):
            for _, part in readable_parts(self.engine, [ulid]) if other != rank else ():
                blobs = part.blobs[:1].copy()
                blobs["blocks"] = 0
                empty = part._replace(rank=rank, blobs=blobs, ids=b"", values=encode_values(()), inline=b"", regions=b"")
                if empty.part_id() == wanted:
                    return empty
        return None

    def _publish(self, info: SnapshotRow, record: Record, parts: Sequence[tuple[Ulid, CompactedPack | None]]) -> None:
        """Writes a record that names rebuilt parts, and commits their relocations."""
        self.overwrite(ObjectKey("snapshot", info.ulid), record.encode())
        for ulid, move in parts:
            if move is not None:
                commit_relocation(self.engine, move, self.anchor, [ObjectKey("part", ulid), ObjectKey("snapshot", info.ulid)])

    def _write_part(self, part: Part) -> tuple[Ulid, CompactedPack | None]:
        """Writes a part with the same content and blocks in this store; and the relocation that leads to them, if any."""
        if not part.block_count:
            return self._put_part(part._replace(packs=[], extents=np.zeros(0, EXTENT_DTYPE))), None
        locations = self._locations(part)
        nowhere, numbers = self.engine.new_id(), {block: number for number, block in enumerate(locations)}
        extents = np.zeros(part.block_count, EXTENT_DTYPE)
        ends = list(accumulate((location.stored for location in locations.values()), initial=HEADER.size))
        for row in range(part.block_count):
            block = part.block_id(row)
            entry, location = numbers[block], locations[block]
            extents[row] = (0, entry, ends[entry], location.stored, location.raw, -1, location.codec, 0)
        move = write_relocation(self.engine, nowhere, range(len(locations)), list(locations.values()))
        return self._put_part(part._replace(packs=[nowhere], extents=extents)), move

    def _put_part(self, part: Part) -> Ulid:
        ulid = self.engine.new_id()
        self.engine.backend.put(part_name(ulid), part._replace(base_ids=b"", anchor=self.anchor).encode())
        return ulid

    def _locations(self, part: Part) -> Mapping[Digest, Location]:
        """The positions of the part's distinct blocks, in the order of its extents."""
        ids = list(dict.fromkeys(part.block_id(row) for row in range(part.block_count)))
        known = find_copies(self.packs, ids, unless={})
        safe = {
            block: copy
            for block, copies in known.items()
            for copy in copies
            if copy.pack in self.safe and int(copy.row[0]["codec"]) not in CODECS_WITH_BASES
        }
        source = BlockSource(self.engine.backend, self.packs, self.other, [block for block in ids if block not in safe])
        with finishing(PackWriter(self.engine.backend, self.engine.new_id, lambda _: {})) as writer:
            for block in ids:
                if block not in safe:
                    stored = source.get(block)
                    if stored is None:
                        raise MissingObjectError(f"block {block.hex()} has no good copy", object_id=block.hex())
                    writer.add_encoded([EncodedBlock(block, stored.codec, (stored.stored,), stored.raw_bytes)])
        return {block: _location(safe[block]) if block in safe else writer.location(block) for block in ids}


def _location(copy: BlockCopy) -> Location:
    row = copy.row[0]
    return Location(copy.pack, copy.entry, int(row["offset"]), int(row["stored"]), int(row["raw"]), int(row["codec"]))


def _identity(kind: str, data: bytes) -> bytes:
    """The identity of an object, which all its replacements share. Raises `CorruptObjectError` if it is not an object of that kind."""
    name = f"a {kind}"
    if kind == "part":
        return decode_part(data, name).part_id()
    if kind == "snapshot":
        return decode_record(data, name).root()
    unseal(kind, data, name)
    return object_hash(data)

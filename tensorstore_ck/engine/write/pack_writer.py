"""Writes blocks into packs, each once: hash, look up, encode, append. Used by several threads at once.

A location is final only once its pack is sealed, that is durable: until `close` returns, nothing that names these packs may be written.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Digest, IdSource, Ulid, block_id
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import Codec, Encoded
from tensorstore_ck.format.pack import (
    BASE_DTYPE,
    ENTRY_DTYPE,
    HEADER,
    PACK_LIMIT_BYTES,
    PLAIN_HEADER,
    decode_footer,
    encode_footer,
    pack_name,
    stored_check,
)
from tensorstore_ck.log.block_index import Base, Location

SHARED_PACK_BYTES: Final = 64 << 20
"""A second pack is started only if the first one has this size."""


class BlockEncoding(NamedTuple):
    """How a block is stored."""

    encoded: Encoded
    bases: tuple[Base, ...] = ()
    """The blocks against which it is encoded."""
    flags: int = 0
    """See `Location`."""


class EncodedBlock(NamedTuple):
    """A block on its way into a pack."""

    id: Digest
    codec: Codec
    pieces: tuple[Buffer, ...]
    """The stored bytes, in pieces."""
    raw_bytes: int
    bases: tuple[Base, ...] = ()
    flags: int = 0

    @property
    def stored_bytes(self) -> int:
        """Its size in a pack."""
        size_bytes = 0
        for piece in self.pieces:
            size_bytes += memoryview(piece).nbytes
        return size_bytes


@dataclass(slots=True, eq=False, repr=False)
class _OpenPack:
    ulid: Ulid
    writer: ObjectWriter
    reserved_bytes: int = HEADER.size
    appending: int = 0
    full: bool = False
    rows: list[tuple[bytes, int, int, int, int, int, int, int]] = field(default_factory=list)
    """Rows of `ENTRY_DTYPE`, in any order until the pack is sealed."""
    based: dict[bytes, EncodedBlock] = field(default_factory=dict)
    """Blocks with bases, without their bytes."""


@dataclass(eq=False, repr=False)
class PackWriter:
    """Takes runs of blocks from any thread, and writes packs of up to `limit_bytes`."""

    backend: Backend
    new_id: IdSource
    known: Callable[[Sequence[Digest]], Mapping[Digest, Location]]
    """Returns the locations of those blocks that lie in the store already; called under a lock."""
    open_packs: int = 1
    """Up to so many packs are written in parallel."""
    limit_bytes: int = PACK_LIMIT_BYTES
    meter: SaveMeter = field(default_factory=SaveMeter)
    """Counts every run; an error that it raises ends the work."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._open: list[_OpenPack] = []
        self._unsealed: list[_OpenPack] = []
        self._claimed: set[Digest] = set()
        self.found: dict[Digest, Location] = {}
        """Blocks that were in the store already."""
        self.added: dict[Digest, Location] = {}
        """Blocks of sealed packs."""
        self.new_bytes = 0

    def add(
        self,
        run: Sequence[Buffer],
        encode: Callable[[int], BlockEncoding] | None = None,
        identify: Callable[[int], Digest] | None = None,
    ) -> list[Digest]:
        """Stores the blocks of `run` that are not there yet; returns all their ids. The buffers may be reused afterwards.

        `encode` returns the stored bytes of a new block, by its number in the run; without it they are stored raw. `identify` returns
        the id of a block.
        """
        with self.meter.timed("hash", sum(map(len, run))):
            ids = [*map(block_id, run)] if identify is None else [*map(identify, range(len(run)))]
        with self._lock:
            fresh = self._claim(ids)
        if fresh:
            blocks = []
            with self.meter.timed("encode", sum(map(len, map(run.__getitem__, fresh)))):
                for number in fresh:
                    encoding = encode(number) if encode else BlockEncoding(Encoded(Codec.RAW, (run[number],)))
                    blocks.append(EncodedBlock(ids[number], *encoding.encoded, len(run[number]), encoding.bases, encoding.flags))
            self._append(blocks)
        return ids

    def claim_all_stored(self, ids: Sequence[Digest]) -> bool:
        """Claims these blocks if the store has all of them: `found` has them then, and the caller need not read them."""
        with self._lock:
            places = self._places_of(ids)
            if len(places) < len(set(ids)):
                return False
            self._add_found(places)
        return True

    def claim_stored(self, ids: Sequence[Digest], sizes_bytes: Sequence[int]) -> list[bool]:
        """Claims those of these blocks that the store has, and says which: `found` has them. They count as hashed, and are not read."""
        with self._lock:
            places = self._places_of(ids)
            self._add_found(places)
        is_there = [block in places for block in ids]
        self.meter.count("hash", sum(compress(sizes_bytes, is_there)))
        return is_there

    def add_encoded(self, blocks: Sequence[EncodedBlock]) -> None:
        """Stores encoded blocks that are not there yet; the caller has verified them. Their buffers may be reused afterwards."""
        with self._lock:
            fresh = [blocks[number] for number in self._claim([block.id for block in blocks])]
        if fresh:
            self._append(fresh)

    def location(self, block: Digest) -> Location:
        """The location of a block that was found or written; only after `close`."""
        return self.added.get(block) or self.found[block]

    def close(self) -> None:
        """Seals all open packs: everything added is durable afterwards."""
        packs, self._open = self._open, []
        with self.meter.timed("write"):
            for_each(packs, self._seal, len(packs))

    def abort(self) -> None:
        """Gives up packs that are not sealed yet; sealed ones stay behind as orphans."""
        for pack in self._unsealed:
            pack.writer.abort()

    def _places_of(self, ids: Sequence[Digest]) -> dict[Digest, Location]:
        return {**self.known([block for block in ids if block not in self.found]), **{b: self.found[b] for b in ids if b in self.found}}

    def _add_found(self, places: Mapping[Digest, Location]) -> None:
        self.found |= places
        self._claimed |= places.keys()

    def _claim(self, ids: Sequence[Digest]) -> list[int]:
        """The numbers of the blocks that this caller must write: those that nobody claimed before, and that are not in the store."""
        first: dict[Digest, int] = {}
        for number, block in enumerate(ids):
            if block not in self._claimed:
                first.setdefault(block, number)
        known = self.known([*first])
        self.found |= known
        self._claimed |= first.keys()
        for block in known:
            del first[block]
        return [*first.values()]

    def _append(self, blocks: list[EncodedBlock]) -> None:
        pieces, stored, size = list[Buffer](), list[tuple[int, int]](), 0
        for block in blocks:
            check, stored_bytes = (0, block.raw_bytes) if block.codec == Codec.RAW else (stored_check(*block.pieces), block.stored_bytes)
            pieces += block.pieces
            stored.append((check, stored_bytes))
            size += stored_bytes
        with self._lock:
            pack = self._pack_to_append_to()
            pack.reserved_bytes += size
            pack.appending += 1
            if pack.reserved_bytes >= self.limit_bytes:
                pack.full = True
                self._open.remove(pack)
        with self.meter.timed("write", size):
            offset = pack.writer.append(pieces)
        rows, based = [], dict[bytes, EncodedBlock]()
        for block, (check, stored_bytes) in zip(blocks, stored, strict=True):
            rows.append((block.id, offset, check, stored_bytes, block.raw_bytes, block.codec, 0, 0))
            offset += stored_bytes
            if block.bases:
                based[block.id] = block._replace(pieces=())
        with self._lock:
            pack.rows += rows
            pack.based |= based
            pack.appending -= 1
            last = pack.full and not pack.appending
        if last:
            self._seal(pack)

    def _pack_to_append_to(self) -> _OpenPack:
        """An open pack that no thread appends to, if possible: filesystems let one writer at a time into a file."""
        pack = min(self._open, key=lambda pack: pack.appending, default=None)
        if pack is None or (pack.appending and len(self._open) < self.open_packs and pack.reserved_bytes >= SHARED_PACK_BYTES):
            ulid = self.new_id()
            pack = _OpenPack(ulid, self.backend.open_writer(pack_name(ulid)))
            self._unsealed.append(pack)
            pack.writer.append([PLAIN_HEADER])
            self._open.append(pack)
        return pack

    def _seal(self, pack: _OpenPack) -> None:
        """Writes the footer and makes the pack durable."""
        pack.rows.sort(key=itemgetter(1))
        entries = np.array(pack.rows, ENTRY_DTYPE)
        header, data_bytes = PLAIN_HEADER, HEADER.size + int(entries["stored"].sum(dtype=np.int64))
        bases = list[tuple[int, int, Digest]]()
        for number, row in enumerate(pack.rows) if pack.based else ():
            if (based := pack.based.get(row[0])) is not None:
                bases += [(number, 0, base.block) for base in based.bases]
        footer = encode_footer(header, entries, np.array(bases, BASE_DTYPE))
        decode_footer(header, footer, data_bytes + len(footer), pack_name(pack.ulid))
        if pack.writer.append([footer]) != data_bytes:
            raise CorruptObjectError(f"{pack_name(pack.ulid)}: its footer does not follow its blocks", object_id=pack_name(pack.ulid))
        pack.writer.close()
        with self._lock:
            self._unsealed.remove(pack)
            self.new_bytes += data_bytes + len(footer)
            for number, (block, offset, _, stored, raw, codec, _, _) in enumerate(pack.rows):
                based = pack.based.get(block)
                more = (based.bases, based.flags) if based is not None else ()
                self.added[Digest(block)] = Location(pack.ulid, number, offset, stored, raw, codec, *more)

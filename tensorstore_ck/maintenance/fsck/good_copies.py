"""Sources of good blocks for repair: other copies in this store and in another one, all verified.

Copies are found by the footers of packs. A listed pack may be freed soon, so blocks found here are copied, never referred to.

An unreadable source of a lost object may still be good: a backend notes failed reads that do not prove damage, even if a caller handles the
error. After one, a repair marks nothing.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid, block_id
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.block_reader import decode_at
from tensorstore_ck.errors import DamageError, StoreError, UnreadableError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, StoredBlock, decode
from tensorstore_ck.format.pack import Footer, pack_name
from tensorstore_ck.gc.listing import list_kind
from tensorstore_ck.log.block_index import Location
from tensorstore_ck.maintenance.fsck.check_packs import BlockCopy, Packs, find_copies
from tensorstore_ck.maintenance.fsck.findings import UNREADABLE, kind_of, require_reachable

T = TypeVar("T")


class OtherStore(NamedTuple):
    """Another store, which may have objects that this one lost."""

    engine: Engine
    packs: Packs
    parts: list[Ulid]


def open_other(engine: Engine) -> OtherStore:
    """Lists another store."""
    with contextlib.suppress(DamageError):  # a part of its log may be enough
        engine.log.sync()
    return OtherStore(engine, Packs(engine.backend, list_kind(engine.backend, "pack")), sorted(list_kind(engine.backend, "part")))


class BlockSource:
    """Blocks by their ids."""

    def __init__(
        self,
        backend: Backend,
        packs: Packs,
        other: OtherStore | None,
        wanted: Iterable[Digest],
        *,
        deltas: Mapping[Digest, Sequence[Location]] = MappingProxyType({}),
    ) -> None:
        """Locates the `wanted` blocks and their bases. `deltas`: where parts say that those in packs without a usable footer are."""
        self._backend, self._deltas = backend, deltas
        self._stores = [(backend, packs), *([(other.engine.backend, other.packs)] if other is not None else [])]
        self._copies: list[dict[Digest, list[BlockCopy]]] = [{} for _ in self._stores]
        ids = set(wanted)
        while ids:  # then their bases
            bases: set[Digest] = set()
            for (_, there), copies in zip(self._stores, self._copies, strict=True):
                located = find_copies(there, ids, unless={})
                copies |= located
                bases.update(base for found_copies in located.values() for copy in found_copies for base in _bases_of(there, copy))
            bases.update(base.block for block in ids for place in deltas.get(block, ()) for base in place.bases)
            ids = {base for base in bases if not any(base in copies for copies in self._copies)}

    def get(self, block: Digest, above: frozenset[Digest] = frozenset()) -> StoredBlock | None:
        """A block from the first copy that verifies; a delta is returned decoded. `above`: what it is a base of."""
        if block in above:
            return None
        for (backend, packs), copies in zip(self._stores, self._copies, strict=True):
            for copy in copies.get(block, ()):
                bases = [self.get(base, above | {block}) for base in _bases_of(packs, copy)]
                stored = read_block(backend, copy, block, [base for base in bases if base is not None])
                if stored is not None:
                    return stored
        mended: dict[tuple[Digest, ...], dict[Digest, memoryview]] = {}
        for place in self._deltas.get(block, ()):
            delta = self._delta(block, place)
            own = tuple(base.block for base in place.bases)
            if delta is None and own not in mended:
                mended[own] = self._bases(own, above | {block})
            delta = delta or self._delta(block, place, mended[own])
            if delta is not None:
                return delta
        return None

    def _bases(self, blocks: Sequence[Digest], above: frozenset[Digest]) -> dict[Digest, memoryview]:
        """Bases of a difference, from any good copies."""
        found = {}
        for block in blocks:  # no comprehension, which takes a frame: chains are long
            stored = self.get(block, above)
            if stored is not None:
                found[block] = decode(stored.codec, stored.stored, stored.raw_bytes, block.hex())
        return found

    def _delta(self, block: Digest, place: Location, bases: Mapping[Digest, memoryview] = MappingProxyType({})) -> StoredBlock | None:
        try:
            raw = decode_at(self._backend, place, at_hand=bases)
        except StoreError as exc:
            require_reachable(self._backend, exc)
            return None
        return StoredBlock(Codec.RAW, raw, len(raw)) if block_id(raw) == block else None


def _bases_of(packs: Packs, copy: BlockCopy) -> list[Digest]:
    footer = packs.footer(copy.pack) if int(copy.row[0]["codec"]) in CODECS_WITH_BASES else None
    return footer.bases_of(copy.entry) if isinstance(footer, Footer) else []


def read_block(backend: Backend, copy: BlockCopy, block: Digest, bases: Sequence[StoredBlock] = ()) -> StoredBlock | None:
    """Reads a copy; None if it is damaged, or a delta without its `bases`. A delta is returned decoded."""
    name, row = pack_name(copy.pack), copy.row[0]
    stored, codec = memoryview(bytearray(int(row["stored"]))), int(row["codec"])
    try:
        raw_bases = [decode(base.codec, base.stored, base.raw_bytes, name) for base in bases]
        backend.read_into(name, int(row["offset"]), stored)
        raw = decode(codec, stored, int(row["raw"]), name, bases=raw_bases)
    except StoreError as exc:
        require_reachable(backend, exc)
        return None
    if block_id(raw) != block:
        return None
    return StoredBlock(Codec.RAW, raw, len(raw)) if codec in CODECS_WITH_BASES else StoredBlock(Codec(codec), stored, len(raw))


class ReadErrors:
    """Notes such errors of several backends. Thread-safe."""

    def __init__(self) -> None:
        self._found: list[StoreError] = []

    def noting(self, backend: Backend) -> Backend:
        """`backend`, whose reads are noted."""
        return _NotedReads(backend, self._found)

    def require_none(self) -> None:
        """Raises the first one. Raises `UnreadableError`: an object could not be read."""
        for exc in self._found:
            raise UnreadableError(f"the repair stops, and marks nothing: {exc}", object_id=exc.object_id) from exc


class _NotedReads(ForwardingBackend):
    """Notes errors of reads."""

    def __init__(self, inner: Backend, errors: list[StoreError]) -> None:
        super().__init__(inner)
        self._found = errors

    def get(self, name: str, *, max_bytes: int) -> bytes:
        return self._noting(lambda: self.inner.get(name, max_bytes=max_bytes))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._noting(lambda: self.inner.read_into(name, offset, target))

    def size(self, name: str) -> int:
        return self._noting(lambda: self.inner.size(name))

    def _noting(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except StoreError as exc:
            if kind_of(exc) == UNREADABLE:
                self._found.append(exc)
            raise

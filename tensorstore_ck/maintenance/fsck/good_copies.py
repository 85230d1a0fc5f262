"""Sources of good blocks for repair: other copies in this store and in another one, all verified.

Copies are found by the footers of packs. A listed pack may be freed soon, so blocks found here are copied, never referred to.
"""

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid, block_id
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import DamageError, StoreError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, StoredBlock, decode
from tensorstore_ck.format.pack import Footer, pack_name
from tensorstore_ck.gc.listing import list_kind
from tensorstore_ck.maintenance.fsck.block_tables import BlockPlace, find_copies
from tensorstore_ck.maintenance.fsck.check_packs import Packs
from tensorstore_ck.maintenance.fsck.findings import require_reachable


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

    def __init__(self, backend: Backend, packs: Packs, other: OtherStore | None, wanted: Iterable[Digest]) -> None:
        """Locates the `wanted` blocks and their bases."""
        self._stores = [(backend, packs), *([(other.engine.backend, other.packs)] if other is not None else [])]
        self._copies: list[dict[Digest, list[BlockPlace]]] = [{} for _ in self._stores]
        ids = set(wanted)
        while ids:  # then their bases
            bases: set[Digest] = set()
            for (_, there), copies in zip(self._stores, self._copies, strict=True):
                found = find_copies(there, ids, unless={})
                copies |= found
                bases.update(base for places in found.values() for place in places for base in _bases_of(there, place))
            ids = {base for base in bases if not any(base in copies for copies in self._copies)}

    def get(self, block: Digest) -> StoredBlock | None:
        """A block from the first copy that verifies; a delta is returned decoded."""
        for (backend, packs), copies in zip(self._stores, self._copies, strict=True):
            for place in copies.get(block, ()):
                found = read_block(backend, place, block)
                if found is None:
                    found = self._from_bases(backend, packs, place, block)
                if found is not None:
                    return found
        return None

    def _from_bases(self, backend: Backend, packs: Packs, place: BlockPlace, block: Digest) -> StoredBlock | None:
        name, row = pack_name(place.pack), place.row[0]
        bases = [self.get(base) for base in _bases_of(packs, place)]
        try:
            raws = [decode(base.codec, base.stored, base.raw_bytes, name) for base in bases if base is not None]
            stored = memoryview(bytearray(int(row["stored"])))
            backend.read_into(name, int(row["offset"]), stored)
            raw = decode(int(row["codec"]), stored, int(row["raw"]), name, bases=raws)
        except StoreError as exc:
            require_reachable(backend, exc)
            return None
        return StoredBlock(Codec.RAW, raw, len(raw)) if block_id(raw) == block else None


def _bases_of(packs: Packs, place: BlockPlace) -> list[Digest]:
    footer = packs.footer(place.pack) if int(place.row[0]["codec"]) in CODECS_WITH_BASES else None
    return footer.bases_of(place.entry) if isinstance(footer, Footer) else []


def read_block(backend: Backend, place: BlockPlace, block: Digest) -> StoredBlock | None:
    """Reads a copy; None if it is damaged or a delta."""
    name, row = pack_name(place.pack), place.row[0]
    stored = memoryview(bytearray(int(row["stored"])))
    try:
        backend.read_into(name, int(row["offset"]), stored)
        raw = decode(int(row["codec"]), stored, int(row["raw"]), name)
    except StoreError as exc:
        require_reachable(backend, exc)
        return None
    return StoredBlock(Codec(int(row["codec"])), stored, len(raw)) if block_id(raw) == block else None

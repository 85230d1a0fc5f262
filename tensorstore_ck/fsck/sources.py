"""Where repair takes good bytes from: blocks in place, other copies of them in this store, and in another one. All are verified.

Copies are found by the packs' footers. That a pack is listed says nothing about how long it stays, so what is found here is read and
written anew, never referred to.
"""

import contextlib
from collections.abc import Iterable
from typing import NamedTuple

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.codec import decode
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import DamageError, StoreError
from tensorstore_ck.fsck.blocks import Place, find_copies
from tensorstore_ck.fsck.findings import require_reachable
from tensorstore_ck.fsck.packcheck import Listed, Packs
from tensorstore_ck.ids import Digest, Ulid, block_id, parse_ulid
from tensorstore_ck.log import FOLDERS, ObjectKey
from tensorstore_ck.pack import pack_name


class Other(NamedTuple):
    """Another store, whose objects may be what this one lost."""

    engine: Engine
    packs: Packs
    parts: list[Ulid]


def open_other(engine: Engine) -> Other:
    """Looks at what another store has."""
    with contextlib.suppress(DamageError):  # what it has of its log may be enough
        engine.log.sync()
    listed: dict[str, dict[Ulid, Listed]] = {}
    for kind in ("pack", "part"):
        found = listed.setdefault(kind, {})
        for info in engine.backend.list(f"{FOLDERS[kind]}/"):
            ulid = parse_ulid(info.name[-26:])
            if ulid is not None and ObjectKey(kind, ulid).name == info.name:
                found[ulid] = Listed(info.size_bytes, info.modified_ns)
    return Other(engine, Packs(engine.backend, listed["pack"]), sorted(listed["part"]))


class BlockSource:
    """Blocks by their ids."""

    def __init__(self, backend: Backend, packs: Packs, other: Other | None, wanted: Iterable[Digest]) -> None:
        """Looks for the `wanted` blocks."""
        ids = set(wanted)
        self._stores = [(backend, find_copies(packs, ids, unless={}))]
        if other is not None:
            self._stores.append((other.engine.backend, find_copies(other.packs, ids, unless={})))

    def get(self, block: Digest) -> memoryview | None:
        """The raw bytes of a block, from the first copy that verifies."""
        for backend, copies in self._stores:
            for place in copies.get(block, ()):
                raw = read_block(backend, place, block)
                if raw is not None:
                    return raw
        return None


def read_block(backend: Backend, place: Place, block: Digest) -> memoryview | None:
    """The raw bytes at a place, if they are that block."""
    name, row = pack_name(place.pack), place.row[0]
    stored = memoryview(bytearray(int(row["stored"])))
    try:
        backend.read_into(name, int(row["offset"]), stored)
        raw = decode(int(row["codec"]), stored, int(row["raw"]), name)
    except StoreError as exc:
        require_reachable(backend, exc)
        return None
    return raw if block_id(raw) == block else None

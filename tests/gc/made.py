"""Snapshots made by the format code alone: parts that refer to any blocks, with no packs behind them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import init_store, make_engine, read_config
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Part, part_name
from tensorstore_ck.format.record import Record, encode_metadata, record_name
from tensorstore_ck.log import Op, SnapshotRow
from tensorstore_ck.log.cache import MemoryTable, Table

Place = tuple[int, int]
"""(pack, entry)."""


def pack_ulid(pack: int) -> Ulid:
    return Ulid(b"packs" + pack.to_bytes(11, "big"))


def stored_bytes(place: Place) -> int:
    """Of a block: differs from one position to the next."""
    return 100 + 7 * place[0] + place[1] % 1000


class Counting(MemoryBackend):
    """Counts the parts that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.parts_read = 0

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self.parts_read += name.startswith("parts/")
        return super().get(name, max_bytes=max_bytes)


def open_engine(backend: MemoryBackend, table: Table | None = None) -> Engine:
    engine = make_engine(backend, read_config(backend) or init_store(backend), table or MemoryTable())
    engine.log.sync()
    return engine


def make_part(places: Sequence[Place], *, rank: int = 0, ranks: int = 1, bases: int = 0, inline: bytes = b"") -> Part:
    """A part whose last `bases` rows are delta bases of the first ones; where it may, its pack table has one pack that no row refers to."""
    used = sorted({pack for pack, _ in places}, reverse=True)
    packs = [*used, 1 << 20] if len(used) < len(places) else used
    extents = np.zeros(len(places), EXTENT_DTYPE)
    extents["pack"] = [packs.index(pack) for pack, _ in places]
    extents["entry"] = [entry for _, entry in places]
    extents["stored"] = [stored_bytes(place) for place in places]
    extents["raw"] = 2 * extents["stored"]
    extents["offset"] = 64
    extents["base"] = -1
    blocks = len(places) - bases
    extents["base"][: min(bases, blocks)] = np.arange(blocks, blocks + min(bases, blocks))
    ids = np.arange(4 * blocks, dtype="<u8").tobytes()
    blobs = np.zeros(1, BLOB_DTYPE)
    return Part(
        Digest(bytes(32)),
        rank,
        ranks,
        blobs,
        ids,
        b"\x90",
        inline,
        list(map(pack_ulid, packs)),
        extents,
        bytes(32 * bases),
        0,
        None if ranks == 1 else b"",
    )


class Made(NamedTuple):
    info: SnapshotRow
    parts: list[Ulid]
    object_bytes: list[int]
    """Of the record, and of each part."""


def publish(engine: Engine, ref: str, step: int, parts: Sequence[Part], ulids: list[Ulid] | None = None) -> Made:
    """Saves a snapshot of these parts; with `ulids` they are there already."""
    if ulids is None:
        ulids = [engine.new_id() for _ in parts]
        for ulid, part in zip(ulids, parts, strict=True):
            engine.backend.put(part_name(ulid), part.encode())
    sizes = [engine.backend.size(part_name(ulid)) for ulid in ulids]
    ids = b"".join(part.part_id() for part in parts)
    record = Record(ref, step, None, encode_metadata(None), {}, step, ulids, ids, 1000 + step, 0)
    snapshot, sealed = engine.new_id(), record.encode()
    engine.backend.put(record_name(snapshot), sealed)
    engine.log.append(lambda _: [Op.put(ref, snapshot, record, sealed, anchor=0, txn=snapshot)])
    info = engine.log.view().snapshot(snapshot)
    assert info is not None
    return Made(info, ulids, [len(sealed), *sizes])

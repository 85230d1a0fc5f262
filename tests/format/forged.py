"""Snapshots that none of our writers would make, under right hashes: what an attacker who may write to the bucket can store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import zstandard

from tensorstore_ck.common.ids import DIGEST_BYTES, block_id
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.format.pack import ENTRY_DTYPE, PLAIN_HEADER, encode_footer, pack_name, stored_check
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Part, encode_values, part_name
from tensorstore_ck.format.record import Record, encode_metadata, record_name
from tensorstore_ck.format.sealed import seal
from tensorstore_ck.log.operations import Op
from tensorstore_ck.store import Store

Block = bytes
"""Raw bytes of a block: the same ones are stored once, however many rows name them."""


@dataclass
class Forged:
    """One part: blobs (the layout first) as lists of their blocks, then the tensors' blocks, then what is in the part."""

    layout: bytes
    values: Sequence[Any] = ()
    blobs: Sequence[Sequence[Block]] = ()
    tensors: Sequence[Block] = ()
    inline: bytes = b""
    rank: int = 0
    more: Mapping[str, Any] = field(default_factory=dict)


def layout_of(tree: Any, tensors: Sequence[tuple[str, tuple[int, ...]]] = (), **more: Any) -> bytes:
    """A sealed layout of float32 tensors; `more` replaces keys of it."""
    body = {
        "names": [name for name, _ in tensors],
        "dtypes": [["float32", 4]],
        "dtype_of": bytes(2 * len(tensors)),
        "dims_of": bytes(len(shape) for _, shape in tensors),
        "shapes": np.array([extent for _, shape in tensors for extent in shape], "<i8").tobytes(),
        "storages": [],
        "tree": tree,
        "mesh": None,
        "placements": None,
    }
    return seal("layout", {**body, **more})


def publish(store: Store, *parts: Forged, ranks: int = 1) -> int:
    """Saves a snapshot of these parts on ``bomb``; returns how many bytes were written."""
    engine = store.engine
    header = PLAIN_HEADER
    data, rows, row_of = bytearray(header), list[tuple[Any, ...]](), dict[bytes, int]()
    for part in parts:
        for block in [*_cut(part.layout), *(block for blob in part.blobs for block in blob), *part.tensors]:
            if block in row_of:
                continue
            stored = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(block)
            row_of[block] = len(rows)
            rows.append((block_id(block), len(data), stored_check(stored), len(stored), len(block), Codec.ZSTD, 0, 0))
            data += stored
    entries = np.array(rows, ENTRY_DTYPE)
    pack = engine.new_id()
    written = {pack_name(pack): bytes(data) + encode_footer(header, entries)}
    ulids, ids = [], b""
    for part in parts:
        blobs = [_cut(part.layout), *part.blobs]
        blocks = [block for blob in blobs for block in blob] + [*part.tensors]
        extents = np.zeros(len(blocks), EXTENT_DTYPE)
        numbers = [row_of[block] for block in blocks]
        for name in ("offset", "stored", "raw", "codec"):
            extents[name] = entries[name][numbers]
        extents["entry"], extents["base"] = numbers, -1
        made = Part(
            part.layout[-DIGEST_BYTES:],  # type: ignore[arg-type]
            part.rank,
            ranks,
            np.array([(len(blob), 0, sum(map(len, blob))) for blob in blobs], BLOB_DTYPE),
            b"".join(rows[number][0] for number in numbers),
            encode_values(part.values),
            part.inline,
            [pack],
            extents,
            b"",
            0,
            **part.more,
        )
        ulids.append(engine.new_id())
        ids += made.part_id()
        written[part_name(ulids[-1])] = made.encode()
    record = Record("bomb", 1, None, encode_metadata(None), {}, 1, ulids, ids, 0, 0)
    snapshot, sealed = engine.new_id(), record.encode()
    written[record_name(snapshot)] = sealed
    for name, content in written.items():
        engine.backend.put(name, content)
    engine.log.append(lambda view: [Op.put("bomb", snapshot, record, sealed, anchor=0, txn=snapshot)])
    return sum(map(len, written.values()))


def _cut(data: bytes) -> list[bytes]:
    return [data[at : at + (4 << 20)] for at in range(0, len(data), 4 << 20)]

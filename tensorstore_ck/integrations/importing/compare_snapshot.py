"""Whether a snapshot has exactly the content of a checkpoint; hashes the checkpoint, and reads no block of the snapshot."""

from typing import Final

import numpy as np

from tensorstore_ck.chunker import cut_opaque
from tensorstore_ck.common.ids import ZERO_DIGEST, Digest, block_id
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.interfaces import CapturedState
from tensorstore_ck.engine.write.write_plan import only_author, places_of
from tensorstore_ck.format.block_assignment import encode_regions
from tensorstore_ck.format.layout import layout_id
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Part, encode_values
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import config_of, read_record

_RUN_BLOCKS: Final = 64


def is_in_snapshot(store: ReadOnlyStore, captured: CapturedState, info: SnapshotRow) -> bool:
    """Whether a save of `captured` would store the snapshot's tensors, values and structure. Raises `CorruptObjectError` for damage."""
    return read_record(store, info).part_ids == _part_id(captured, config_of(store).block_bytes)


def _part_id(captured: CapturedState, block_bytes: int) -> Digest:
    """The id of the part that a save by one process would write (FORMAT.md, "Parts")."""
    author = only_author(captured)
    layout = captured.layout.encoded
    blobs = np.zeros(1 + len(captured.blobs), BLOB_DTYPE)
    ids: list[Digest] = []
    for number, blob in enumerate((layout, *captured.blobs)):
        at, lengths = 0, cut_opaque(blob)
        for length in lengths:
            ids.append(block_id(memoryview(blob)[at : at + length]))
            at += length
        blobs[number] = (len(lengths), 0, len(blob))
    inline: list[bytes] = []
    blocks: list[tuple[int, int, int]] = []
    for region, start, share in places_of(captured, author, block_bytes):
        if share.is_inline:
            inline.append(bytes(captured.sources[region.tensor].read(start, start + share.lengths[0])))
            continue
        for length in share.lengths:
            blocks.append((region.tensor, start, start + length))
            start += length
    hashes = [ZERO_DIGEST] * len(blocks)

    def hash_run(rows: range) -> None:
        for row in rows:
            tensor, start, stop = blocks[row]
            hashes[row] = block_id(captured.sources[tensor].read(start, stop))

    runs = (range(first, min(first + _RUN_BLOCKS, len(blocks))) for first in range(0, len(blocks), _RUN_BLOCKS))
    for_each(runs, hash_run, cpu_threads())
    part = Part(
        layout_id=layout_id(layout),
        rank=author.rank,
        world_size=author.world_size,
        blobs=blobs,
        ids=b"".join([*ids, *hashes]),
        values=encode_values(captured.values),
        inline=b"".join(inline),
        packs=(),
        extents=np.zeros(0, EXTENT_DTYPE),
        base_ids=b"",
        anchor=0,
        layout_of=author.layout_of,
        regions=encode_regions(captured.explicit),
    )
    return part.part_id()

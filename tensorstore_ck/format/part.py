"""Parts: what one rank contributes to one snapshot. Pure: bytes in, bytes out. Format: FORMAT.md, "Parts".

The logical section (layout, coordinate, block ids, values, small tensors) is what the part id hashes. The physical section says where
each block is; it may differ in another store, or after a compaction, while the part keeps its id. Ids and extents are raw little-endian
arrays with one row per block: first the blocks of the blobs (blob 0 is the layout), then those of the tensors, in the order of the
layout and the grid; the extents end with the delta bases that are not blocks of this part.
"""

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid, derived_hash, split_ulids
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.layout import MAX_RANKS
from tensorstore_ck.format.pack import HEADER, MAX_BLOCK_BYTES
from tensorstore_ck.format.sealed import (
    BYTES_PER_ITEM,
    FREE_BYTES,
    HEADER_BYTES,
    MAX_OBJECT_BYTES,
    ParseBudget,
    check_msgpack,
    object_name,
    pack_body,
    seal,
    take,
    take_count,
    take_digest,
    unpack_body,
    unseal,
)

EXTENT_DTYPE: Final = np.dtype(
    [
        ("pack", "<u4"),
        ("entry", "<u4"),
        ("offset", "<u8"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("base", "<i4"),
        ("codec", "<u2"),
        ("flags", "<u2"),
    ]
)
"""``pack`` is a position in the part's pack table; ``base`` is the row of the delta base, after all rows of blocks, or -1."""
BLOB_DTYPE: Final = np.dtype([("blocks", "<u4"), ("reserved", "<u4"), ("size", "<u8")])
PART_HEADER: Final = struct.Struct("<32sIIQQQQ")
"""The layout id, rank, world size, and the bytes of the blobs, ids, values and inline tensors."""
GROUP_HEADER: Final = struct.Struct("<QQ")
"""The bytes of the layout numbers and of the regions: before these, at the end of a part of a group."""
MAX_PACK_BYTES: Final = 1 << 40
MAX_BLOB_BLOCK_BYTES: Final = 1 << 22
"""The largest block of opaque bytes: it limits a reader's allocations in proportion to the part's own size."""

Extents = npt.NDArray[np.void]


class Part(NamedTuple):
    """One decoded part."""

    layout_id: Digest
    rank: int
    world_size: int
    blobs: Extents
    """Rows of `BLOB_DTYPE`; row 0 is the layout."""
    ids: bytes
    """32 bytes per block."""
    values: bytes
    """msgpack list: one encoded value for each hole of the layout's tree."""
    inline: bytes
    """The bytes of all tensors of up to `INLINE_TENSOR_BYTES`, in order."""
    packs: Sequence[Ulid]
    extents: Extents
    """Rows of `EXTENT_DTYPE`."""
    base_ids: bytes
    """Block ids of the rows after the last block: delta bases that are not blocks of this part."""
    anchor: int
    """The log entry under which the extents were chosen."""
    layout_of: bytes | None = None
    """In a snapshot of many ranks: each rank's layout number (``<u2``), by order of first appearance; empty when all have one layout."""
    regions: bytes = b""
    """This rank's regions of tensors whose regions do not follow from the layout: see `block_assignment.encode_regions`."""

    @property
    def stored_bytes(self) -> int:
        """Roughly the part's size in the store."""
        tables = (self.blobs.nbytes, self.extents.nbytes, len(self.ids), len(self.base_ids), ULID_BYTES * len(self.packs))
        return sum(tables) + len(self.values) + len(self.inline) + len(self.layout_of or b"") + len(self.regions)

    @property
    def block_count(self) -> int:
        """The number of blocks; repeated ones count each time."""
        return len(self.ids) // DIGEST_BYTES

    def block_ids(self) -> list[Digest]:
        """The ids of all blocks, by row."""
        ids: list[Digest] = np.frombuffer(self.ids, f"V{DIGEST_BYTES}").tolist()
        return ids

    def block_id(self, row: int) -> Digest:
        """The id of the block in extent row `row`."""
        at, ids_bytes = row * DIGEST_BYTES, len(self.ids)
        ids, at = (self.ids, at) if at < ids_bytes else (self.base_ids, at - ids_bytes)
        return Digest(ids[at : at + DIGEST_BYTES])

    def part_id(self) -> Digest:
        """The hash of the logical section."""
        return derived_hash("part", *self.logical_section())

    def logical_section(self) -> tuple[bytes, ...]:
        """What the part id hashes, in pieces; the first one is a `PART_HEADER`."""
        blobs = self.blobs.tobytes()
        sizes = len(blobs), len(self.ids), len(self.values), len(self.inline)
        pieces = PART_HEADER.pack(self.layout_id, self.rank, self.world_size, *sizes), blobs, self.ids, self.values, self.inline
        if self.layout_of is None:
            return pieces
        return *pieces, GROUP_HEADER.pack(len(self.layout_of), len(self.regions)), self.layout_of, self.regions

    def encode(self) -> bytes:
        """The sealed part object."""
        return seal(
            "part",
            {
                "layout": self.layout_id,
                "rank": self.rank,
                "world_size": self.world_size,
                "coordinate": self.layout_of,
                "regions": self.regions or None,
                "blobs": self.blobs.tobytes(),
                "ids": self.ids,
                "values": self.values,
                "inline": self.inline,
                "packs": b"".join(self.packs),
                "extents": self.extents.tobytes(),
                "base_ids": self.base_ids,
                "anchor": self.anchor,
            },
        )


part_name = partial(object_name, "part")
"""The name of a part in the store, by its ULID."""


def require_readable(part: Part, layout: bytes, blobs: Sequence[bytes], *, ranks: int, ranks_of_layout: int) -> None:
    """Rejects what a reader would take for a decompression bomb; all parts together stay below its limit.

    Args:
        part: The part that has the layout.
        layout: The encoded layout.
        blobs: The large values that hold msgpack.
        ranks: The number of parts.
        ranks_of_layout: The number of parts with this layout.

    Raises:
        UnsupportedValueError: too many objects take almost no bytes in the store.
    """
    bodies, free_bytes = [layout[HEADER_BYTES:-DIGEST_BYTES], *blobs], FREE_BYTES // (2 * ranks)
    size_bytes = sum(map(len, bodies))
    if size_bytes * (1 + BYTES_PER_ITEM) <= free_bytes:
        return  # even if each byte was an item, and no byte was stored
    budget = ParseBudget(free_bytes)
    encoded_bytes = int(part.extents["stored"][: int(part.blobs["blocks"].sum())].sum(dtype=np.int64))
    # gc may re-encode the layout in fewer bytes: the reader will find at least a quarter of them.
    budget.add_stored(encoded_bytes // 4 + part.stored_bytes + (ULID_BYTES + DIGEST_BYTES) * ranks_of_layout)
    if size_bytes <= budget.max_items(size_bytes):
        return  # even if each byte was an item
    try:
        for body in bodies:
            check_msgpack(memoryview(body), "the state", budget)
    except CorruptObjectError as exc:
        raise UnsupportedValueError(
            "the state has too many empty containers, tensors or sets for the few bytes that it takes: leave some out, or merge them"
        ) from exc


def encode_values(values: Sequence[object]) -> bytes:
    """The bytes of a part's ``values``."""
    return pack_body(list(values))


def decode_values(part: Part, name: str) -> list[Any]:
    """The encoded values of a part. Raises `CorruptObjectError` if they are not a msgpack list."""
    values = unpack_body(memoryview(part.values), name)
    if not isinstance(values, list):
        raise CorruptObjectError(f"{name}: its values are not a list", object_id=name)
    return values


def decode_part(data: bytes, name: str) -> Part:
    """Decodes and checks a sealed part. Raises `CorruptObjectError` if it is not a part, or its fields contradict each other."""
    body = unseal("part", data, name)
    try:
        packs, extents = take(body, "packs", bytes), np.frombuffer(take(body, "extents", bytes), EXTENT_DTYPE)
        if len(packs) > ULID_BYTES * len(extents):
            raise ValueError("it names more packs than it has rows")
        part = Part(
            layout_id=take_digest(body, "layout"),
            rank=take_count(body, "rank"),
            world_size=take_count(body, "world_size"),
            blobs=np.frombuffer(take(body, "blobs", bytes), BLOB_DTYPE),
            ids=take(body, "ids", bytes),
            values=take(body, "values", bytes),
            inline=take(body, "inline", bytes),
            packs=split_ulids(packs),
            extents=extents,
            base_ids=take(body, "base_ids", bytes),
            anchor=take_count(body, "anchor"),
            layout_of=None if body.get("coordinate") is None else take(body, "coordinate", bytes),
            regions=b"" if body.get("regions") is None else take(body, "regions", bytes),
        )
    except (TypeError, ValueError) as exc:
        raise CorruptObjectError(f"{name} is not a valid part: {exc!r}", object_id=name) from exc
    _check(part, len(packs), name)
    return part


def _check(part: Part, pack_table_bytes: int, name: str) -> None:
    """Cross-checks all counts, lengths and offsets, so that no later step allocates or reads by a forged one."""
    extents, blocks = part.extents, part.block_count
    base_count = len(part.base_ids) // DIGEST_BYTES
    rows = blocks + base_count
    problem = ""
    if pack_table_bytes % ULID_BYTES or len(part.ids) % DIGEST_BYTES or len(part.base_ids) % DIGEST_BYTES:
        problem = "an id is truncated"
    elif len(extents) != rows or int(part.blobs["blocks"].sum(dtype=np.int64)) > blocks or not len(part.blobs):
        problem = "its tables differ in length"
    elif problem := group_problem(part.rank, part.world_size, part.layout_of, part.regions):
        pass
    elif int(part.blobs["size"][0]) > MAX_OBJECT_BYTES:
        problem = "its layout is too large"
    elif rows and (
        int(extents["pack"].max()) >= len(part.packs)
        or int(extents["raw"].max()) > MAX_BLOCK_BYTES
        or int(extents["stored"].max()) > MAX_BLOCK_BYTES
        or int(extents["raw"].min()) == 0
        or int(extents["offset"].min()) < HEADER.size
        or int(extents["offset"].max()) > MAX_PACK_BYTES
    ):
        problem = "an extent is out of bounds"
    elif len(set(part.packs)) != len(part.packs):
        problem = "it names a pack twice"
    elif int(extents["raw"][: int(part.blobs["blocks"].sum(dtype=np.int64))].max(initial=0)) > MAX_BLOB_BLOCK_BYTES:
        problem = "a block of a large value is too large"
    else:
        # A base's row comes after the row that needs it and after all blocks, so chains end.
        bases = extents["base"].astype(np.int64)
        has_base = bases != -1
        own_row = np.arange(rows)
        if not np.all(~has_base | ((bases > own_row) & (bases >= blocks) & (bases < rows))):
            problem = "a delta base is out of bounds"
    if problem:
        raise CorruptObjectError(f"{name} is not a valid part: {problem}", object_id=name)


def group_problem(rank: int, world_size: int, layout_of: bytes | None, regions: bytes) -> str:
    """What is wrong with these fields of a part; empty: nothing."""
    if not rank < 2 * world_size <= 2 * MAX_RANKS:  # rank states follow the ranks' own parts
        return "its rank or world size is impossible"
    if layout_of is not None if rank >= world_size else layout_of is None and world_size > 1:
        return "it lacks the layout numbers of its group, or it is a rank state and has them"
    if not _is_numbering(layout_of or b"", world_size):
        return "its layouts are not one number for each rank, by order of first appearance"
    if len(regions) % 8 or (regions and layout_of is None):  # the part id would not cover such regions
        return "its regions are truncated, or it belongs to no group of ranks"
    return ""


def _is_numbering(layout_of: bytes, ranks: int) -> bool:
    """Whether `layout_of` has the form that `Part.layout_of` documents."""
    if len(layout_of) != (2 * ranks if layout_of else 0):
        return False
    numbers = np.frombuffer(layout_of, "<u2").astype(np.int64)
    highest = np.maximum.accumulate(np.concatenate(([-1], numbers)))
    return not layout_of or bool(np.all(numbers <= highest[:-1] + 1) and highest[-1] > 0)

"""Packs: many encoded blocks and a footer that lists them. Pure: bytes in, bytes out. Format: FORMAT.md, "Packs".

    header | block | block | ... | entry table | base table | trailer

There are no gaps, so a hash covers every byte of a pack: block ids cover raw blocks, ``check`` also covers encoded ones, and the
trailer's hash covers the rest. Parts have the extents that readers of a snapshot need; only fsck, salvage and repair read footers.
"""

import struct
from bisect import bisect_left, bisect_right
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Digest, derived_hash
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
from tensorstore_ck.format.sealed import object_name

PACK_LIMIT_BYTES: Final = 1 << 30
MAX_BLOCK_BYTES: Final = 64 << 20
MAX_ENTRIES: Final = 1 << 22
"""Limits the footer, which readers hold in memory, to 256 MiB. Raw tensor blocks average over 2 KiB, so a full pack has far fewer."""
MAX_BASES: Final = 64
"""Delta bases of one block."""
PACK_MAGIC: Final = b"TSCKPACK"
FOOTER_MAGIC: Final = b"TSCKFOOT"
PACK_VERSION: Final = 1
HEADER = struct.Struct("<8sII16s24s8x")
"""magic, version, flags, key id, nonce (the last three zero: a plain pack)."""
TRAILER = struct.Struct("<QQ32s8s8x")
"""entries, bases, hash, magic."""
ENTRY_DTYPE: Final = np.dtype(
    [
        ("id", "V32"),
        ("offset", "<u8"),
        ("check", "<u8"),
        ("stored", "<u4"),
        ("raw", "<u4"),
        ("codec", "<u2"),
        ("reserved", "<u2"),
        ("pad", "<u4"),
    ]
)
BASE_DTYPE: Final = np.dtype([("entry", "<u4"), ("pad", "<u4"), ("id", "V32")])

Entries = npt.NDArray[np.void]

NO_BASES: Final[Entries] = np.zeros(0, BASE_DTYPE)


class Footer(NamedTuple):
    """A decoded pack footer."""

    entries: Entries
    """One row of `ENTRY_DTYPE` per block, by offset."""
    bases: Entries
    """Rows of `BASE_DTYPE`, sorted by entry: one for each base of a block, in the codec's order."""

    def bases_of(self, entry: int) -> list[Digest]:
        """The bases of an entry."""
        entries = self.bases["entry"]
        first, stop = bisect_left(entries, entry), bisect_right(entries, entry)  # np.searchsorted would copy the column
        return [Digest(block.tobytes()) for block in self.bases["id"][first:stop]]


pack_name = partial(object_name, "pack")
"""The name of a pack in the store, by its ULID."""


PLAIN_HEADER: Final[bytes] = HEADER.pack(PACK_MAGIC, PACK_VERSION, 0, bytes(16), bytes(24))
"""The header of a plain pack."""


def stored_check(*pieces: Buffer) -> int:
    """The first eight bytes of an encoded block's hash: with them the block can be checked without its delta base."""
    return int.from_bytes(derived_hash("stored block", *(memoryview(piece) for piece in pieces))[:8], "little")


def encode_footer(header: bytes, entries: Entries, bases: Entries = NO_BASES) -> bytes:
    """Entry table, base table and trailer."""
    table = entries.tobytes() + bases.tobytes()
    counts = struct.pack("<QQ", len(entries), len(bases))
    return table + TRAILER.pack(len(entries), len(bases), derived_hash("pack footer", header, table, counts), FOOTER_MAGIC)


def footer_bytes(trailer: bytes | memoryview, pack_bytes: int, name: str) -> int:
    """The footer's length in bytes, trailer included, from the last `TRAILER.size` bytes of a pack.

    Raises:
        CorruptObjectError: the trailer is damaged or incomplete.
    """
    if len(trailer) != TRAILER.size:
        raise CorruptObjectError(f"{name} is truncated: it has no trailer", object_id=name)
    count, bases, _, magic = TRAILER.unpack(trailer)
    size: int = count * ENTRY_DTYPE.itemsize + bases * BASE_DTYPE.itemsize + TRAILER.size
    if magic != FOOTER_MAGIC or count > MAX_ENTRIES or bases > MAX_BASES * count or size + HEADER.size > pack_bytes:
        raise CorruptObjectError(f"{name} has no valid trailer: it was damaged or truncated", object_id=name)
    return size


def decode_footer(header: bytes | memoryview, footer: bytes | memoryview, pack_bytes: int, name: str) -> Footer:
    """Decodes and checks the header and the footer of a pack of `pack_bytes` bytes; `footer` is its last `footer_bytes` bytes.

    Raises:
        CorruptObjectError: a hash does not match, or the entries do not tile the pack.
        FormatVersionError: the pack is encrypted or has a newer version.
    """
    size = footer_bytes(footer[-TRAILER.size :], pack_bytes, name)
    if len(footer) != size or len(header) != HEADER.size:
        raise CorruptObjectError(f"{name} is truncated", object_id=name)
    count, bases, expected, _ = TRAILER.unpack(footer[-TRAILER.size :])
    counts = struct.pack("<QQ", count, bases)
    if derived_hash("pack footer", memoryview(header), memoryview(footer)[: -TRAILER.size], counts) != expected or any(footer[-8:]):
        raise CorruptObjectError(f"{name} does not match its footer's hash: it was damaged; run `tsck fsck`", object_id=name)
    magic, version, flags, _, _ = HEADER.unpack(header)
    if magic != PACK_MAGIC:
        raise CorruptObjectError(f"{name} is not a pack", object_id=name)
    if version != PACK_VERSION or flags:
        raise FormatVersionError(f"{name} has pack version {version}, flags {flags:#x}: upgrade tensorstore_ck", object_id=name)
    entries = np.frombuffer(footer, ENTRY_DTYPE, count)
    starts = entries["offset"].astype(np.int64)
    stored = entries["stored"].astype(np.int64)
    ends = np.concatenate(([HEADER.size], starts + stored))
    if not np.array_equal(ends, np.concatenate((starts, [pack_bytes - size]))):
        raise CorruptObjectError(f"{name}: its entries have gaps or overlap", object_id=name)
    if count and int(entries["raw"].max()) > MAX_BLOCK_BYTES:
        raise CorruptObjectError(f"{name}: a block is larger than {MAX_BLOCK_BYTES} bytes", object_id=name)
    base_rows = np.frombuffer(footer, BASE_DTYPE, bases, count * ENTRY_DTYPE.itemsize)
    if bases and (int(base_rows["entry"].max()) >= count or np.any(np.diff(base_rows["entry"].astype(np.int64)) < 0)):
        raise CorruptObjectError(f"{name}: a delta base belongs to no entry, or the bases are not in order", object_id=name)
    return Footer(entries, base_rows)

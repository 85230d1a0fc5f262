"""Verifies ranges of a pack, part or record by the hashes inside it, while they are copied.

These hashes cover every byte of an object (`format.pack`, `format.sealed`). To verify a range, the rest of
the blocks that it cuts is read, too. So each range is verified on its own: in any order, by any thread or process, before it is sent.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.ids import DIGEST_BYTES, block_id
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.format.pack import HEADER, TRAILER, Footer, decode_footer, footer_bytes, stored_check
from tensorstore_ck.format.sealed import FOLDERS, HEADER_BYTES, KINDS, MAGIC, seal_of

ReadInto = Callable[[int, memoryview], None]
"""Fills memory with an object's bytes from an offset."""
Verify = Callable[[int, memoryview], None]
"""Raises CorruptObjectError unless these are the object's bytes from an offset."""

_KIND_OF_FOLDER: Final = {folder: kind for kind, folder in FOLDERS.items()}


class PackEnds(NamedTuple):
    """What lies around the blocks of a pack."""

    header: bytes
    footer: bytes
    decoded: Footer


def read_pack_ends(read: ReadInto, size_bytes: int, name: str) -> PackEnds:
    """Reads header and footer of a pack, in three small reads.

    Raises:
        DamageError: missing or damaged.
    """
    if size_bytes < HEADER.size + TRAILER.size:
        raise CorruptObjectError(f"{name} is truncated", object_id=name)
    header = _read(read, 0, HEADER.size)
    size = footer_bytes(_read(read, size_bytes - TRAILER.size, TRAILER.size), size_bytes, name)
    footer = _read(read, size_bytes - size, size)
    return PackEnds(header, footer, decode_footer(header, footer, size_bytes, name))


def open_verifier(name: str, size_bytes: int, read: ReadInto) -> Verify:
    """Verifies ranges of the object `name`, which `read` reads.

    Raises:
        CorruptObjectError: its header or footer is damaged, or it is cut off.
        FormatVersionError: a newer build wrote it.
    """
    verifier = _PackVerifier if name.startswith("packs/") else _SealedVerifier
    return verifier(name, size_bytes, read)


class _PackVerifier:
    def __init__(self, name: str, size_bytes: int, read: ReadInto) -> None:
        self._name = name
        self._read = read
        self._header, self._footer, decoded = read_pack_ends(read, size_bytes, name)
        self._footer_start = size_bytes - len(self._footer)
        self._entries = decoded.entries
        self._ends = self._entries["offset"] + self._entries["stored"]

    def __call__(self, offset: int, data: memoryview) -> None:
        _require_equal(self._name, start=0, expected=self._header, offset=offset, data=data)
        _require_equal(self._name, start=self._footer_start, expected=self._footer, offset=offset, data=data)
        first = int(np.searchsorted(self._ends, offset, side="right"))
        stop = int(np.searchsorted(self._entries["offset"], offset + len(data), side="left"))
        for block, start, check, stored, _, codec, _, _ in self._entries[first:stop].tolist():
            whole = _whole(self._read, range(start, start + stored), offset, data)
            if (block_id(whole) != block) if codec == Codec.RAW else (stored_check(whole) != check):
                raise _damaged(self._name, start, start + stored)


class _SealedVerifier:
    """One hash covers such an object. It is read once for each range; only objects far larger than usual have several."""

    def __init__(self, name: str, size_bytes: int, read: ReadInto) -> None:
        self._name = name
        self._read = read
        self._size_bytes = size_bytes
        self._kind = _KIND_OF_FOLDER[name.partition("/")[0]]
        if size_bytes < HEADER_BYTES + DIGEST_BYTES:
            raise CorruptObjectError(f"{name} is truncated", object_id=name)

    def __call__(self, offset: int, data: memoryview) -> None:
        whole = memoryview(_whole(self._read, range(self._size_bytes), offset, data))
        magic, seal = bytes(whole[:HEADER_BYTES]), bytes(whole[-DIGEST_BYTES:])
        if magic != MAGIC + KINDS[self._kind] or seal_of(self._kind, whole[:-DIGEST_BYTES]) != seal:
            raise _damaged(self._name, 0, self._size_bytes)


def _whole(read: ReadInto, wanted: range, offset: int, data: memoryview) -> bytes | memoryview:
    """The `wanted` bytes of an object. Takes those that lie in `data`, which begins at `offset`, and reads the others."""
    start, stop = max(wanted.start, offset), min(wanted.stop, offset + len(data))
    inner = data[start - offset : stop - offset]
    if len(inner) == len(wanted):
        return inner
    return b"".join((_read(read, wanted.start, start - wanted.start), inner, _read(read, stop, wanted.stop - stop)))


def _read(read: ReadInto, offset: int, size_bytes: int) -> bytes:
    data = bytearray(size_bytes)
    if data:
        read(offset, memoryview(data))
    return bytes(data)


def _require_equal(name: str, start: int, expected: bytes, offset: int, data: memoryview) -> None:
    """Compares `data`, which begins at `offset`, with the `expected` bytes, which begin at `start`, where they overlap."""
    low, high = max(start, offset), min(start + len(expected), offset + len(data))
    if low < high and data[low - offset : high - offset] != expected[low - start : high - start]:
        raise _damaged(name, start, start + len(expected))


def _damaged(name: str, start: int, stop: int) -> CorruptObjectError:
    return CorruptObjectError(f"{name}: bytes {start:,} to {stop:,} do not match their hash", object_id=name)

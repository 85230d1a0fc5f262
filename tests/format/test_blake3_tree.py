"""Verified slices of BLAKE3's tree, against the `blake3` package."""

import random
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format import blake3_tree
from tensorstore_ck.format.blake3_tree import CHUNK_BYTES, Slice, take_slice

POWERS = [1 << bits for bits in (0, 6, 10, 11, 12, 13)]
SIZES = sorted({0, 5 * CHUNK_BYTES, 6 * CHUNK_BYTES + 1, *(power + more for power in POWERS for more in (-1, 0, 1))})


def content(size_bytes: int) -> bytes:
    return random.Random(size_bytes).randbytes(size_bytes)


@pytest.mark.parametrize("size_bytes", SIZES)
def test_a_slice_has_the_hash_of_the_whole(size_bytes: int) -> None:
    data = content(size_bytes)
    middle = (size_bytes // 3, size_bytes // 2)
    for ranges in ([(0, size_bytes)], [(0, min(1, size_bytes)), middle]):
        found = take_slice("part", data, ranges)
        assert found.hash("part", "x") == derived_hash("part", data)
        for start, stop in ranges:
            assert found.read(start, stop, "x") == data[start:stop]


def test_a_slice_of_a_large_string_is_small_and_lacks_what_is_not_in_it() -> None:
    data = content(3_000_000)
    found = take_slice("part", data, [(1_000_000, 1_000_100)])
    assert found.hash("root", "x") != derived_hash("part", data)
    assert found.hash("part", "x") == derived_hash("part", data)
    assert len(found.data) + len(found.nodes) < 3 * CHUNK_BYTES + 2 * 12 * 32
    with pytest.raises(CorruptObjectError, match="lacks the bytes from 5000 to 5001 of 3000000"):
        found.read(5000, 5001, "x")
    with pytest.raises(CorruptObjectError, match="lacks the bytes"):
        found.read(len(data) - 1, len(data) + 1, "x")


def flipped(data: bytes) -> bytes:
    return bytes([data[0] ^ 1]) + data[1:]


FORGED: dict[str, Callable[[Slice], Slice]] = {
    "another byte": lambda it: it._replace(data=flipped(it.data)),
    "another node": lambda it: it._replace(nodes=flipped(it.nodes)),
    "a node less": lambda it: it._replace(nodes=it.nodes[32:]),
    "a node more": lambda it: it._replace(nodes=it.nodes + bytes(32)),
    "half a node": lambda it: it._replace(nodes=it.nodes[:-16]),
    "no nodes": lambda it: it._replace(nodes=b""),
    "another place": lambda it: it._replace(chunks=np.array([2, 6], "<u4").tobytes()),
    "no order": lambda it: it._replace(chunks=np.array([6, 3], "<u4").tobytes()),
    "one chunk twice": lambda it: it._replace(chunks=np.array([6, 6], "<u4").tobytes()),
    "no last chunk": lambda it: it._replace(chunks=it.chunks[:4], data=it.data[:CHUNK_BYTES]),
    "no chunks": lambda it: it._replace(chunks=b"", data=b""),
    "half a number": lambda it: it._replace(chunks=it.chunks[:-1]),
    "a byte longer": lambda it: it._replace(size_bytes=it.size_bytes + 1),
    "a byte longer, with that byte": lambda it: it._replace(size_bytes=it.size_bytes + 1, data=it.data + b"\0"),
    "a chunk longer": lambda it: it._replace(size_bytes=it.size_bytes + CHUNK_BYTES),
    "a chunk shorter": lambda it: it._replace(size_bytes=it.size_bytes - CHUNK_BYTES, chunks=np.array([3, 5], "<u4").tobytes()),
    "less than nothing": lambda it: it._replace(size_bytes=-1),
    "impossibly long": lambda it: it._replace(size_bytes=1 << 60),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_slice_has_another_hash_or_is_refused(forge: Callable[[Slice], Slice]) -> None:
    data = content(6 * CHUNK_BYTES + 100)
    forged = forge(take_slice("part", data, [(3 * CHUNK_BYTES, 3 * CHUNK_BYTES + 1)]))
    with suppress(CorruptObjectError):
        assert forged.hash("part", "x") != derived_hash("part", data)


def test_a_slice_without_the_last_chunk_says_nothing_of_the_length() -> None:
    """Its nodes may be right: they are those of any string with such chunks before the last one."""
    data = content(6 * CHUNK_BYTES + 100)
    key = blake3_tree._derived_key("part")
    chunks = blake3_tree._chunk_values(data, range(7), key, blake3_tree._MATERIAL)
    pairs = [*blake3_tree._parents(b"".join(chunks[:6]), key), chunks[6]]
    right = blake3_tree._parents(pairs[2] + pairs[3], key)[0]
    third = data[3 * CHUNK_BYTES : 4 * CHUNK_BYTES]
    forged = Slice(len(data) + 1, np.array([3], "<u4").tobytes(), third, chunks[2] + pairs[0] + right)
    with pytest.raises(CorruptObjectError, match="impossible numbers of chunks"):
        forged.hash("part", "x")

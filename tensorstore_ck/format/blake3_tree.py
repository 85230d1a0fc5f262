"""Verified slices: some chunks of a hashed byte string, and the rest of BLAKE3's tree that leads from them to the hash. Pure.

BLAKE3 hashes chunks of 1 KiB and joins their chaining values in pairs, level by level: so a few chunks are proven to belong to a hash by
the chaining values beside their way to the root. The `blake3` package returns no chaining values, so numpy compresses here, all chunks of
a batch at once. The last chunk is always among them: it proves the length.

Sources: the BLAKE3 specification, sections 2.1 to 2.5 (https://github.com/BLAKE3-team/BLAKE3-specs/blob/master/blake3.pdf); slices, and
why the last chunk is needed: the Bao specification (https://github.com/oconnor663/bao/blob/master/docs/spec.md). Bao's slices are streams
of one range and have parent nodes, too; these are read at once, and leave out what can be computed.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import CONTEXT_PREFIX, DIGEST_BYTES, Digest
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES

CHUNK_BYTES: Final = 1024
_BLOCK_BYTES: Final = 64
_BATCH: Final = 4096
"""Chunks that are compressed at once, so that the memory for it is bounded."""
_START, _END, _PARENT, _ROOT, _CONTEXT, _MATERIAL = 1, 2, 4, 8, 32, 64
_ROUNDS: Final = 7
_ORDER: Final = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8]
_TURNED: Final = [[1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2]]
"""The rows of the state that are mixed along its diagonals."""
_IV: Final = np.array(
    [0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19],
    np.uint32,
)

Words = npt.NDArray[np.uint32]
"""One column for each of the inputs that are compressed at once."""


class Slice(NamedTuple):
    """Some chunks of a byte string. Nothing of it counts before the caller has compared `hash`."""

    size_bytes: int
    """Of the whole byte string."""
    chunks: bytes
    """The numbers of the chunks (``<u4``), ascending; the last one of the byte string is among them."""
    data: bytes
    """The bytes of these chunks."""
    nodes: bytes
    """32 bytes for each subtree beside their ways to the root: level by level from the chunks on, in order."""

    def hash(self, kind: str, name: str) -> Digest:
        """The hash of the whole byte string, under the derive-key context of `kind`.

        Raises:
            CorruptObjectError: the slice contradicts itself.
        """
        numbers, count = self._numbers(name), _count(self.size_bytes)
        key, flags = _derived_key(kind), _MATERIAL | (_ROOT if count == 1 else 0)
        values = dict(zip(numbers, _chunk_values(self.data, numbers, key, flags), strict=True))
        at = 0
        while count > 1:
            for missing in _siblings(values, count):
                values[missing] = self.nodes[at : at + DIGEST_BYTES]
                at += DIGEST_BYTES
            if at > len(self.nodes):
                break
            pairs = [number for number in sorted(values) if number % 2 == 0 and number + 1 < count]
            joined = b"".join(values[number] + values[number + 1] for number in pairs)
            above = dict(zip((number // 2 for number in pairs), _parents(joined, key, _ROOT if count == 2 else 0), strict=True))
            if count % 2 and count - 1 in values:
                above[count // 2] = values[count - 1]
            values, count = above, (count + 1) // 2
        if at != len(self.nodes):
            raise CorruptObjectError(f"{name} has {len(self.nodes)} bytes of nodes, not {at}", object_id=name)
        return Digest(values[0])

    def read(self, start: int, stop: int, name: str) -> bytes:
        """The bytes [start, stop) of the byte string, once `hash` was compared.

        Raises:
            CorruptObjectError: a chunk with one of them is not in the slice.
        """
        if start == stop:
            return b""
        first, last = start // CHUNK_BYTES, (stop - 1) // CHUNK_BYTES
        numbers = np.frombuffer(self.chunks, "<u4")
        at = int(np.searchsorted(numbers, first))
        if not 0 <= start < stop <= self.size_bytes or numbers[at : at + last - first + 1].tolist() != list(range(first, last + 1)):
            raise CorruptObjectError(f"{name} lacks the bytes from {start} to {stop} of {self.size_bytes}", object_id=name)
        at = at * CHUNK_BYTES + start % CHUNK_BYTES
        return self.data[at : at + stop - start]

    def _numbers(self, name: str) -> list[int]:
        """The numbers of the chunks, once everything that can be counted was checked."""
        count = _count(self.size_bytes)
        numbers = np.frombuffer(self.chunks, "<u4").tolist() if len(self.chunks) % 4 == 0 else []
        data_bytes = CHUNK_BYTES * (len(numbers) - 1) + self.size_bytes - CHUNK_BYTES * (count - 1)
        is_ascending = all(one < other for one, other in pairwise(numbers))
        if not 0 <= self.size_bytes <= MAX_OBJECT_BYTES or not numbers or not is_ascending or numbers[-1] != count - 1:
            raise CorruptObjectError(f"{name} has impossible numbers of chunks", object_id=name)
        if len(self.data) != data_bytes or len(self.nodes) % DIGEST_BYTES:
            raise CorruptObjectError(f"{name} has {len(self.data)} bytes of chunks, not {data_bytes}, or a truncated node", object_id=name)
        return numbers


def take_slice(kind: str, data: bytes, ranges: Iterable[tuple[int, int]]) -> Slice:
    """The slice with the bytes [start, stop) of each of `ranges`, of what has a hash under the derive-key context of `kind`."""
    key, count = _derived_key(kind), _count(len(data))
    wanted = {count - 1}
    for start, stop in ranges:
        wanted.update(range(start // CHUNK_BYTES, -(-stop // CHUNK_BYTES)))
    opened = sorted(wanted)
    values, nodes = _chunk_values(data, range(count), key, _MATERIAL), list[bytes]()
    known: Iterable[int] = opened
    while len(values) > 1:
        nodes += [values[number] for number in _siblings(known, len(values))]
        known = {number // 2 for number in known}
        even = len(values) // 2 * 2
        values = _parents(b"".join(values[:even]), key) + values[even:]
    chunks = b"".join(data[CHUNK_BYTES * number : CHUNK_BYTES * (number + 1)] for number in opened)
    return Slice(len(data), np.array(opened, "<u4").tobytes(), chunks, b"".join(nodes))


def _count(size_bytes: int) -> int:
    """How many chunks a byte string has: an empty one has one."""
    return max(1, -(-size_bytes // CHUNK_BYTES))


def _siblings(known: Iterable[int], count: int) -> list[int]:
    """The nodes of a level that are joined with those that are known, and are not known."""
    there = set(known)
    return [number ^ 1 for number in sorted(there) if number ^ 1 < count and number ^ 1 not in there]


@cache
def _derived_key(kind: str) -> bytes:
    return _chunk_values((CONTEXT_PREFIX + kind).encode(), [0], _IV.tobytes(), _CONTEXT | _ROOT)[0]


def _chunk_values(data: bytes, numbers: Sequence[int], key: bytes, flags: int) -> list[bytes]:
    """The chaining value of each chunk, by their numbers in the byte string; only the last one may be shorter than the others."""
    full = len(data) // CHUNK_BYTES
    values = list[bytes]()
    for first in range(0, full, _BATCH):
        several = numbers[first : min(first + _BATCH, full)]
        values += _equal_chunks(data[CHUNK_BYTES * first : CHUNK_BYTES * (first + len(several))], several, key, flags)
    if full < len(numbers):
        values += _equal_chunks(data[CHUNK_BYTES * full :], numbers[full:], key, flags)
    return values


def _equal_chunks(data: bytes, numbers: Sequence[int], key: bytes, flags: int) -> list[bytes]:
    """The chaining values of chunks of one length."""
    size = len(data) // len(numbers)
    blocks = max(1, -(-size // _BLOCK_BYTES))
    padded = np.zeros((len(numbers), blocks * _BLOCK_BYTES), np.uint8)
    padded[:, :size] = np.frombuffer(data, np.uint8).reshape(len(numbers), size)
    words = padded.view("<u4").reshape(len(numbers), blocks, 16).transpose(1, 2, 0)
    chained = _columns(key * len(numbers), 8)
    for block in range(blocks):
        is_last = block == blocks - 1
        here = flags & ~_ROOT | (_START if block == 0 else 0) | (_END | flags & _ROOT if is_last else 0)
        chained = _compress(chained, words[block], numbers, size - _BLOCK_BYTES * block if is_last else _BLOCK_BYTES, here)
    return _rows(chained)


def _parents(children: bytes, key: bytes, root: int = 0) -> list[bytes]:
    """The chaining value of each pair of children."""
    words = _columns(children, 16)
    return _rows(_compress(_columns(key * words.shape[1], 8), words, [0] * words.shape[1], _BLOCK_BYTES, _MATERIAL | _PARENT | root))


def _columns(data: bytes, words: int) -> Words:
    return np.frombuffer(data, "<u4").reshape(-1, words).T


def _rows(chained: Words) -> list[bytes]:
    joined = chained.T.astype("<u4").tobytes()
    return [joined[at : at + DIGEST_BYTES] for at in range(0, len(joined), DIGEST_BYTES)]


def _compress(chained: Words, words: Words, counters: Sequence[int], size_bytes: int, flags: int) -> Words:
    """The compression function, truncated to 32 bytes. `counters`: of each column; at most 2^32."""
    a, b = chained[:4], chained[4:]
    c = np.repeat(_IV[:4, None], len(counters), axis=1)
    d = np.zeros((4, len(counters)), np.uint32)
    d[0], d[2], d[3] = counters, size_bytes, flags
    for _ in range(_ROUNDS):
        a, b, c, d = _mix(a, b, c, d, words[:8])
        b, c, d = b[_TURNED[0]], c[_TURNED[1]], d[_TURNED[2]]
        a, b, c, d = _mix(a, b, c, d, words[8:])
        b, c, d = b[_TURNED[2]], c[_TURNED[1]], d[_TURNED[0]]
        words = words[_ORDER]
    return np.concatenate((a ^ c, b ^ d))


def _mix(a: Words, b: Words, c: Words, d: Words, words: Words) -> tuple[Words, Words, Words, Words]:
    """The function G on four columns, or diagonals, of the state at once."""
    for message, to_d, to_b in ((words[::2], 16, 12), (words[1::2], 8, 7)):
        a = a + b + message
        d = _rotated(d ^ a, to_d)
        c = c + d
        b = _rotated(b ^ c, to_b)
    return a, b, c, d


def _rotated(words: Words, bits: int) -> Words:
    return (words >> np.uint32(bits)) | (words << np.uint32(32 - bits))

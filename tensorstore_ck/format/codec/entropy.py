"""Entropy-codes groups of bytes with zstd: as a pure Huffman coder if values do not repeat in runs, with matches if they do.

The pure coder's parameters: docs/decisions/008-zstd-as-entropy-coder.md. Its match search finds next to nothing and costs next to nothing.
"""

import math
from enum import IntEnum
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np
import zstandard

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.format.codec.byte_split import Words, bytes_of, split

NOISE_BITS: Final = 7.8
"""Bytes with a higher entropy are stored unencoded."""
REPEATING_BITS: Final = 1.5
"""Bytes with a lower entropy are coded with matches: a Huffman code takes at least a bit for each byte."""
RUNS_SHARE: Final = 0.1
"""How many more of all bytes than by chance are equal to the one before, where they have runs."""
SMALL_SHARE: Final = 1 / 64
SEARCHED_SHARE: Final = 1 / 32
"""Matches are searched for in groups that are coded in more than this share of their bytes, and of the coded block: the search takes ten
times as long as the rest."""
WORTH_SHARE: Final = 1 / 100
"""A trial must save at least this share of the coded block."""
PROBED_FROM_BYTES: Final = 1 << 16
PROBES: Final = 4
PROBES_SHARE: Final = 1 / 16
LEAST_PROBE_BYTES: Final = 1 << 12
"""A trial on so many pieces, together this share of the bytes, decides. Smaller groups are searched without a trial."""
SAMPLE_PIECES: Final = 16
SAMPLE_WORDS: Final = 512
"""Words in each piece of a sample."""
MAX_SAMPLE_WORDS: Final = 2 * SAMPLE_PIECES * SAMPLE_WORDS
ENTROPY_DIGITS: Final = 9
"""Behind the point: the entropy of equal bytes is zero."""
WORTH: Final = 0.98


class GroupCoding(IntEnum):
    """How a group of bytes is stored. The numbers are format."""

    RAW = 0
    ZSTD = 1
    CONSTANT = 2


def sample(words: Words) -> Words:
    """Evenly spaced pieces of the words; all words if they are few."""
    if len(words) <= MAX_SAMPLE_WORDS:
        return words
    step = (len(words) - SAMPLE_WORDS) // (SAMPLE_PIECES - 1)
    pieces: Words = np.ndarray((SAMPLE_PIECES, SAMPLE_WORDS), words.dtype, words, strides=(step * words.itemsize, words.itemsize))
    return pieces.reshape(-1)


class Plane(NamedTuple):
    """The bytes at one place of the words of a sample."""

    bits: float
    """Their order-0 entropy, per byte."""
    has_runs: bool
    """Whether they are followed by equal ones clearly more often than by chance: then a search for matches pays. Only with the kernel."""
    variance: float
    """Of the bytes as numbers."""


def survey(some: Words, *, rotated: bool, places: int | None = None) -> list[Plane]:
    """The planes of a sample, the most significant first: all of them, or the first `places`."""
    count, places = len(some), places or some.itemsize
    if compiled.HAS_KERNEL:
        found = compiled.kernel.survey_words(bytes_of(some), _logarithms(), some.itemsize, rotated, places)
    else:
        found = [_surveyed(plane) for plane in split(some, [1] * some.itemsize, rotated=rotated)[:places]]
    planes, divisor = [], max(1, count)
    for logarithms, repeats, squares, values, values_squared in found:
        bits = round(math.log2(divisor) - logarithms / divisor, ENTROPY_DIGITS)
        has_runs = repeats > squares / SAMPLE_WORDS + RUNS_SHARE * count
        planes.append(Plane(bits, has_runs, values_squared / divisor - (values / divisor) ** 2))
    return planes


def _surveyed(plane: Words) -> tuple[float, int, int, int, int]:
    """What the kernel returns of the bytes at one place; no repeats."""
    occurrences, numbers = np.bincount(plane, minlength=256), np.arange(256)
    logarithms: float = np.frombuffer(_logarithms())[occurrences].sum()
    return logarithms, 0, 0, int(occurrences @ numbers), int(occurrences @ numbers**2)


@lru_cache(1)
def _logarithms() -> memoryview:
    """Each number that a byte may have in a sample, times its binary logarithm."""
    numbers = np.arange(MAX_SAMPLE_WORDS + 1, dtype=np.float64)
    return memoryview(numbers * np.log2(np.maximum(numbers, 1))).cast("B")  # type: ignore[arg-type]


CodedBytes = tuple[GroupCoding, bytes | memoryview]
"""How a group is coded, and its stored bytes."""


class EntropyCoder:
    """Encodes groups of bytes. Not thread-safe."""

    def __init__(self, level: int) -> None:
        """`level` is the zstd level for repeating bytes."""
        pure = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, target_length=0, window_log=17, write_content_size=1
        )
        self._pure = zstandard.ZstdCompressor(compression_params=pure)
        self._level = level
        self._matching: zstandard.ZstdCompressor | None = None

    def encode(self, group: Words, bits: float) -> CodedBytes:
        """The coding of a group and its stored bytes. `bits` is the entropy of a sample, in bits per byte."""
        if len(group) and bits == 0 and bool((group == group[0]).all()):
            return GroupCoding.CONSTANT, bytes_of(group[:1])
        if bits > NOISE_BITS:
            return GroupCoding.RAW, bytes_of(group)
        coded = self._pure.compress(bytes_of(group))
        return (GroupCoding.ZSTD, coded) if len(coded) < WORTH * group.nbytes else (GroupCoding.RAW, bytes_of(group))

    def with_matches(self, group: Words, coded: CodedBytes, block_bytes: int) -> CodedBytes:
        """A `coded` group of repeating bytes, smaller if matches make it so; all groups of its block are coded in `block_bytes`."""
        least_bytes = max(SMALL_SHARE * group.nbytes, SEARCHED_SHARE * block_bytes)
        if coded[0] == GroupCoding.CONSTANT or len(coded[1]) <= least_bytes or not self._has_matches(group, block_bytes):
            return coded
        matched = self._encode_with_matches(group)
        return (GroupCoding.ZSTD, matched) if len(matched) < min(len(coded[1]), WORTH * group.nbytes) else coded

    def _has_matches(self, group: Words, block_bytes: int) -> bool:
        """Whether a search for matches makes one of some pieces so small that the block gains from it."""
        if group.nbytes < PROBED_FROM_BYTES:
            return True
        size, step = max(LEAST_PROBE_BYTES, int(len(group) * PROBES_SHARE / PROBES)), len(group) // PROBES
        pieces = (group[start : start + size] for start in range(step // 2, len(group), step))
        needed = size * max(SMALL_SHARE, WORTH_SHARE * block_bytes / group.nbytes)
        return any(len(self._pure.compress(bytes_of(piece))) - len(self._encode_with_matches(piece)) > needed for piece in pieces)

    def _encode_with_matches(self, group: Words) -> bytes:
        if self._matching is None:
            self._matching = zstandard.ZstdCompressor(level=self._level)
        return self._matching.compress(bytes_of(group))


def check_group(how: int, stored: memoryview, count: int, width: int, name: str) -> None:
    """Checks the size of a group of `count` integers of `width` bytes. Raises `CorruptObjectError` if it cannot be right."""
    right = {GroupCoding.RAW: count * width, GroupCoding.CONSTANT: width if count else -1, GroupCoding.ZSTD: len(stored)}
    if right.get(how, -1) != len(stored):  # type: ignore[call-overload]
        raise CorruptObjectError(f"{name}: a group of bytes of a block has the wrong size", object_id=name)


def decode_group(how: int, stored: memoryview, count: int, width: int, name: str) -> Words:
    """Decodes a group that `check_group` accepts. Raises `CorruptObjectError` if `stored` does not decode to it."""
    dtype = np.dtype(f"<u{width}")
    if how == GroupCoding.RAW:
        return np.frombuffer(stored, dtype)
    if how == GroupCoding.CONSTANT:
        return np.broadcast_to(np.frombuffer(stored, dtype), count)
    return np.frombuffer(decompress(stored, count * width, name), dtype)


def decompress(stored: memoryview, size: int, name: str) -> bytes:
    """Decodes one zstd frame of `size` raw bytes. Raises `CorruptObjectError` if it is damaged, or has another size."""
    try:
        declared = zstandard.frame_content_size(stored)
        if declared == size:  # checked before memory is allocated for it
            raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=size, allow_extra_data=False)
            if len(raw) == size:
                return raw
    except zstandard.ZstdError as exc:
        raise CorruptObjectError(f"{name}: a block does not decompress: {exc}", object_id=name) from exc
    raise CorruptObjectError(f"{name}: a block decompresses to {declared} bytes, not {size}", object_id=name)

"""The codec `planes`: the bytes of all elements, grouped by significance; each group is coded separately.

    item bytes (1) | flags (1) | groups (1) | zero (1) | for each group: width (1), how (1), zero (2), stored bytes (4) | the groups

Source: ZipNN (arXiv:2411.05239): in weights only the exponents repeat. A sample decides which bytes are worth coding.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.format.codec.byte_split import Words, bytes_of, merge, split, words_of
from tensorstore_ck.format.codec.entropy import (
    NOISE_BITS,
    REPEATING_BITS,
    SMALL_SHARE,
    CodedBytes,
    EntropyCoder,
    GroupCoding,
    Plane,
    check_group,
    decode_group,
    sample,
    survey,
)

COMPILED_WORDS: Final = 1024
"""From this many words on the compiled kernel encodes them. Of fewer, zstd makes smaller frames."""
SKEWED_BITS: Final = 1.25
"""Where a Huffman code takes less for each byte, one value is so frequent that matches may be smaller."""
FRAME_BLOCK: Final = 1 << 17
"""Raw bytes in each block of a frame that the kernel writes."""
FRAME_BYTES: Final = 10
BLOCK_BYTES: Final = 3
"""The headers of a frame and of a block."""

ROTATED: Final = 1
_HEADER: Final = struct.Struct("<BBBx")
_GROUP: Final = struct.Struct("<BBxxI")

CodedGroup = tuple[int, int, memoryview]
"""The width of a group in bytes, how it is coded, and its stored bytes."""


class Elements(NamedTuple):
    """The elements of a block."""

    item_bytes: int
    """1, 2, 4 or 8."""
    is_float: bool


BYTES: Final = Elements(1, False)


@lru_cache(256)
def elements_of(dtype: str, item_bytes: int) -> Elements:
    """The elements of a tensor; `dtype` as in a layout, `item_bytes` its bytes per element."""
    name = dtype.removeprefix("np:").lstrip("<>=|")
    is_complex = name.startswith("complex") or (dtype.startswith("np:") and name[:1] == "c")
    is_float = is_complex or "float" in name or (dtype.startswith("np:") and name[:1] == "f")
    size = item_bytes // 2 if is_complex else item_bytes
    return Elements(size, is_float) if size in (1, 2, 4, 8) else BYTES


def guess_elements(raw: memoryview) -> Elements:
    """The elements whose planes are estimated to be smallest."""
    fitting = [Elements(size, is_float) for size in (1, 2, 4, 8) if len(raw) % size == 0 for is_float in (False, True)[: min(size, 2)]]
    if not len(raw):
        return BYTES
    return min(fitting, key=lambda each: estimate_planes_share(sample(words_of(raw, each.item_bytes)), rotated=each.is_float))


def planes_or_raw(raw: memoryview, elements: Elements, coder: EntropyCoder) -> list[bytes | memoryview]:
    """The pieces of the stored bytes, even if nothing is worth coding."""
    coded = encode_planes(raw, elements, coder)
    return coded if coded is not None else _not_coded(raw, elements.item_bytes)


def encode_few_words(words: Words, coder: EntropyCoder) -> list[bytes | memoryview]:
    """As `planes_or_raw`, for words that are few: to code all their planes is faster than to choose by a sample."""
    raw, count, item_bytes = bytes_of(words), len(words), words.itemsize
    if not compiled.HAS_KERNEL or count < COMPILED_WORDS:
        return planes_or_raw(raw, Elements(item_bytes, False), coder)
    into = np.empty(_coded_bytes(words, item_bytes), np.uint8)
    codings = bytes([1] * item_bytes), bytes([GroupCoding.ZSTD] * item_bytes)
    frames = [into[start:stop] for start, stop in compiled.kernel.encode_groups(raw, bytes_of(into), item_bytes, False, *codings)]
    coded: list[CodedBytes] = [(GroupCoding.ZSTD, bytes_of(frame)) for frame in frames]
    block_bytes = sum(len(frame) for _, frame in coded)
    for number, (_, frame) in enumerate(coded):
        if SMALL_SHARE * count < len(frame) < SKEWED_BITS / 8 * count:
            plane = words.view("u1")[item_bytes - 1 - number :: item_bytes].copy()
            runs = min(coded[number], coder.encode(plane, SKEWED_BITS), key=lambda group: len(group[1]))
            coded[number] = coder.with_matches(plane, runs, block_bytes)
    return (
        _joined([1] * item_bytes, coded, item_bytes, 0) if sum(len(data) for _, data in coded) < len(raw) else _not_coded(raw, item_bytes)
    )


def _not_coded(raw: memoryview, item_bytes: int) -> list[bytes | memoryview]:
    return [_HEADER.pack(item_bytes, 0, 1), _GROUP.pack(item_bytes, GroupCoding.RAW, len(raw)), raw]


def _joined(widths: Sequence[int], coded: Sequence[CodedBytes], item_bytes: int, flags: int) -> list[bytes | memoryview]:
    header = [_HEADER.pack(item_bytes, flags, len(coded))]
    header += [_GROUP.pack(width, how, len(data)) for width, (how, data) in zip(widths, coded, strict=True)]
    return [b"".join(header), *(data for _, data in coded)]


def _coded_bytes(words: Words, groups: int) -> int:
    """What the kernel writes of words in so many groups, at most."""
    return words.nbytes + groups * (FRAME_BYTES + BLOCK_BYTES * (len(words) // FRAME_BLOCK + 1))


def estimate_planes_share(some: Words, *, rotated: bool) -> float:
    """The estimated size of a block's planes as a share of the block's, by a sample of it."""
    return sum(plane.bits for plane in survey(some, rotated=rotated)) / 8 / some.itemsize


def encode_planes(raw: memoryview, elements: Elements, coder: EntropyCoder) -> list[bytes | memoryview] | None:
    """The pieces of the stored bytes; None if nothing is worth coding."""
    words, rotated = words_of(raw, elements.item_bytes), elements.is_float
    planes = survey(sample(words), rotated=rotated)
    if min(plane.bits for plane in planes) > NOISE_BITS:
        return None
    widths, heads = _group(planes)
    if compiled.HAS_KERNEL and len(words) >= COMPILED_WORDS:
        groups, coded = _split_and_encode(words, widths, heads, coder, rotated=rotated)
    else:
        groups = split(words, widths, rotated=rotated)
        coded = [coder.encode(group, head.bits) for group, head in zip(groups, heads, strict=True)]
    coded_bytes = sum(len(data) for _, data in coded)
    for number, head in enumerate(heads):
        if head.bits < REPEATING_BITS:
            coded[number] = coder.with_matches(groups[number], coded[number], coded_bytes)
    if sum(len(data) for _, data in coded) >= len(raw):
        return None
    return _joined(widths, coded, elements.item_bytes, ROTATED if rotated else 0)


def _split_and_encode(
    words: Words, widths: Sequence[int], heads: Sequence[Plane], coder: EntropyCoder, *, rotated: bool
) -> tuple[list[Words], list[CodedBytes]]:
    """Splits words and codes the groups: Huffman codes in one pass, others in a second one.

    Returns the groups as they are after the first pass: split, or coded; and all as they are coded.
    """
    hows = [GroupCoding.ZSTD if REPEATING_BITS <= head.bits <= NOISE_BITS and not head.has_runs else GroupCoding.RAW for head in heads]
    into = np.empty(_coded_bytes(words, len(widths)), np.uint8)
    places = compiled.kernel.encode_groups(bytes_of(words), bytes_of(into), words.itemsize, rotated, bytes(widths), bytes(hows))
    groups = [into[start:stop] for start, stop in places]
    coded = list[CodedBytes]()
    for number, (how, width, head) in enumerate(zip(hows, widths, heads, strict=True)):
        if how == GroupCoding.ZSTD:
            coded.append((how, bytes_of(groups[number])))
        else:
            groups[number] = groups[number].view(f"<u{width}")
            coded.append(coder.encode(groups[number], head.bits))
    return groups, coded


def decode_planes(stored: memoryview, into: memoryview, name: str) -> None:
    """Decodes the raw bytes into `into`. Raises `CorruptObjectError` if `stored` is malformed, or does not decode to `len(into)` bytes."""
    try:
        item_bytes, flags, count = _HEADER.unpack_from(stored)
        rows = [_GROUP.unpack_from(stored, _HEADER.size + number * _GROUP.size) for number in range(count)]
    except struct.error as exc:
        raise CorruptObjectError(f"{name}: a block is truncated", object_id=name) from exc
    start = _HEADER.size + count * _GROUP.size
    widths = [width for width, _, _ in rows]
    if (
        item_bytes not in (1, 2, 4, 8)
        or flags & ~ROTATED
        or sum(widths) != item_bytes
        or not {1, 2, 4, 8}.issuperset(widths)
        or len(into) % item_bytes
        or start + sum(size for _, _, size in rows) != len(stored)
    ):
        raise CorruptObjectError(f"{name}: a block has planes that do not fit together", object_id=name)
    groups: list[CodedGroup] = []
    for width, how, size in rows:
        groups.append((width, how, stored[start : start + size]))
        check_group(how, groups[-1][2], len(into) // item_bytes, width=width, name=name)
        start += size
    words, rotated = words_of(into, item_bytes), bool(flags & ROTATED)
    if compiled.HAS_KERNEL:
        _decode_and_merge(groups, words, name, rotated=rotated)
    else:
        merge([decode_group(how, data, len(words), width=width, name=name) for width, how, data in groups], words, rotated=rotated)


def _decode_and_merge(groups: list[CodedGroup], into: Words, name: str, *, rotated: bool) -> None:
    """Decodes and merges groups in one pass; those that the kernel does not decode, such as frames with matches, before that."""
    unknown: int | None = -1
    while unknown is not None:
        for number, (width, how, stored) in enumerate(groups):
            if number == unknown or (how == GroupCoding.ZSTD and width > 1):
                groups[number] = (width, GroupCoding.RAW, bytes_of(decode_group(how, stored, len(into), width=width, name=name)))
        unknown = compiled.kernel.decode_groups(groups, bytes_of(into), into.itemsize, rotated)


def _group(planes: Sequence[Plane]) -> tuple[list[int], list[Plane]]:
    """The width of each group in bytes, and its first plane; adjacent bytes of noise form one group, of a machine word's width."""
    widths: list[int] = []
    heads: list[Plane] = []
    at = 0
    while at < len(planes):
        run = next((number for number, plane in enumerate(planes[at:]) if plane.bits <= NOISE_BITS), len(planes) - at)
        width = 1 if run < 2 or run == 3 else 1 << (min(run, 4).bit_length() - 1)
        widths.append(width)
        heads.append(planes[at])
        at += width
    return widths, heads

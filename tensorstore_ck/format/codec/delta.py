"""The codec `delta`: the differences of a block's elements to those of an earlier block.

    form (1) | order (1) | item bytes (1) | zero (1) | changed (4) | bytes of the first planes (4) | planes | planes

Differences are between integers; floats are first mapped to integers of the same order, so close numbers stay close across exponents.
Zigzag coding puts the sign lowest. Form 1, dense: the planes of all differences. Form 2, sparse: the planes of the gaps between changed
elements (u4 each), and of their differences. Form 3, sorted: the planes of all differences, stably sorted by the base's exponent (its
top byte after a rotation by one): an optimizer's steps have similar sizes, so in units of the last place the differences depend on the
exponent, and zstd makes a new Huffman code for each 128 KiB.
"""

import struct
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.threads import Scratch
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.format.codec.byte_planes import BYTES, Elements, decode_planes, encode_few_words, encode_planes, estimate_planes_share
from tensorstore_ck.format.codec.byte_split import Words, add_differences, bytes_of, words_of, zigzag_differences
from tensorstore_ck.format.codec.changed_words import Changes, FewChanges, apply_changes
from tensorstore_ck.format.codec.entropy import EntropyCoder, survey


def sorted_differences(words: Words, base: Words, scratch: Scratch | None = None) -> Words:
    """Zigzag differences of floats, stably sorted by the exponent of the base; in `scratch`, or in new memory."""
    if not compiled.HAS_KERNEL:
        differences: Words = zigzag_differences(words, base, is_float=True)[np.argsort(exponents(base), kind="stable")]
        return differences
    into: Words = words_of(scratch.take("differences", words.nbytes), words.itemsize) if scratch is not None else np.empty_like(words)
    compiled.kernel.take_differences(bytes_of(words), bytes_of(base), bytes_of(into), words.dtype.itemsize)
    return into


def add_sorted(base: Words, differences: Words, into: Words) -> None:
    """The inverse of `sorted_differences`."""
    if compiled.HAS_KERNEL:
        compiled.kernel.add_differences(bytes_of(differences), bytes_of(base), bytes_of(into), into.dtype.itemsize)
        return
    unsorted = np.empty_like(differences)
    unsorted[np.argsort(exponents(base), kind="stable")] = differences
    add_differences(base, unsorted, into, is_float=True)


def exponents(words: Words) -> Words:
    """The exponents: the top bytes of the words rotated left by one bit."""
    top_bytes: Words = ((words << 1) >> (8 * words.dtype.itemsize - 8)).astype(np.uint8)
    return top_bytes


DENSE, SPARSE, SORTED = 1, 2, 3
INTEGERS, FLOATS = 0, 1
SPARSE_TO: Final = 0.1
"""The sparse form is used up to this share of changed elements."""
ONE_SCALE_VARIANCE: Final = 4.0
"""Of the exponents; of normally distributed numbers it is 2.5."""
_HEADER: Final = struct.Struct("<BBBxII")
HEAD_BYTES: Final = _HEADER.size


def sample_differences(some: Words, other: Words, *, is_float: bool) -> Words:
    """Zigzag differences of samples, in any order."""
    return sorted_differences(some, other) if is_float else zigzag_differences(some, other, is_float=False)


class _Header(NamedTuple):
    """See the top of this file."""

    form: int
    order: int
    item_bytes: int
    changed: int
    first: int


def estimate_delta_share(differences: Words) -> float:
    """The estimated size of a block as a difference to its base, as a share of the block's, by `sample_differences`."""
    changed = np.count_nonzero(differences) / max(1, len(differences))
    if changed <= SPARSE_TO:
        return changed * (1 + 1 / differences.itemsize)
    return estimate_planes_share(differences, rotated=False)


def has_one_scale(some: Words) -> bool:
    """Whether a sample of floats looks like normally distributed numbers of one scale."""
    return survey(some, rotated=True, places=1)[0].variance < ONE_SCALE_VARIANCE


def max_changes(size_bytes: int, item_bytes: int) -> int:
    """Up to how many changed words of a block the sparse form is used."""
    return int(SPARSE_TO * (size_bytes // item_bytes))


def is_dense(differences: Words) -> bool:
    """Whether so many words of a sample differ that a comparison of all is not worth it."""
    return bool(np.count_nonzero(differences) > 2 * SPARSE_TO * len(differences))


def encode_few(changes: Changes, elements: Elements, coder: EntropyCoder) -> list[bytes | memoryview]:
    """The pieces of the stored bytes of a block of which few words changed."""
    order = FLOATS if elements.is_float else INTEGERS
    first, second = (encode_few_words(words, coder) for words in (changes.gaps, changes.values))
    return [_HEADER.pack(SPARSE, order, elements.item_bytes, changes.changed, sum(map(len, first))), *first, *second]


def encode_all(
    raw: memoryview, base: memoryview, elements: Elements, coder: EntropyCoder, *, scratch: Scratch
) -> list[bytes | memoryview] | None:
    """The pieces of the stored bytes, with a difference for each word; None if nothing is worth coding. The pieces are not in `scratch`."""
    form, order = (SORTED, FLOATS) if elements.is_float else (DENSE, INTEGERS)
    words, others = words_of(raw, elements.item_bytes), words_of(base, elements.item_bytes)
    differences = sorted_differences(words, others, scratch) if form == SORTED else zigzag_differences(words, others, is_float=False)
    coded = encode_planes(bytes_of(differences), elements._replace(is_float=False), coder)
    return None if coded is None else [_HEADER.pack(form, order, elements.item_bytes, 0, 0), *coded]


def elements_of_delta(stored: Buffer) -> Elements:
    """The elements of a block from its header; `BYTES` if that is damaged."""
    order, item_bytes = stored[1], stored[2]
    return Elements(item_bytes, order == FLOATS) if item_bytes in (1, 2, 4, 8) else BYTES


def decode_delta(stored: memoryview, into: memoryview, base: memoryview, name: str, scratch: Scratch | None = None) -> None:
    """Decodes the raw bytes into `into`, which may be `base` itself: the sparse form then writes only the words that differ.

    The differences are decoded in `scratch`, or in new memory.

    Raises:
        CorruptObjectError: `stored` is malformed, or does not fit `base` or `into`.
    """
    header = _header_of(stored, len(into), name)
    if len(base) != len(into):
        raise _misfit(name)
    if header.form == SPARSE:
        _decode_few(stored, header, into=into, base=base, name=name)
        return
    item_bytes = header.item_bytes
    differences: Words = np.frombuffer((scratch or Scratch()).take("differences", len(into)), f"<u{item_bytes}")
    decode_planes(stored[_HEADER.size :], bytes_of(differences), name)
    if header.form == SORTED:
        add_sorted(words_of(base, item_bytes), differences, words_of(into, item_bytes))
    else:
        is_float = header.order == FLOATS
        add_differences(words_of(base, item_bytes), differences, words_of(into, item_bytes), is_float=is_float)


def decode_changes(stored: memoryview, raw_bytes: int, name: str) -> FewChanges | None:
    """The words that a difference of the sparse form changes; None for the other forms.

    Raises:
        CorruptObjectError: `stored` is malformed.
    """
    header = _header_of(stored, raw_bytes, name)
    return _few_changes(stored, header, name) if header.form == SPARSE else None


def _decode_few(stored: memoryview, header: _Header, into: memoryview, base: memoryview, name: str) -> None:
    if not header.changed:
        if into is not base:
            into[:] = base
        return
    changes = _few_changes(stored, header, name)
    patched = base if into is base else memoryview(bytearray(base))
    if not apply_changes(changes.gaps, changes.values, patched, is_float=changes.is_float):
        raise _misfit(name)
    if into is not base:
        into[:] = patched  # each word once: see `merge`


def _few_changes(stored: memoryview, header: _Header, name: str) -> FewChanges:
    rest = stored[_HEADER.size :]
    gaps, values = np.empty(header.changed, "<u4"), np.empty(header.changed, f"<u{header.item_bytes}")
    if header.changed:
        decode_planes(rest[: header.first], bytes_of(gaps), name)
        decode_planes(rest[header.first :], bytes_of(values), name)
    return FewChanges(gaps, values, header.order == FLOATS)


def _header_of(stored: memoryview, raw_bytes: int, name: str) -> _Header:
    """The header of a block of `raw_bytes`."""
    try:
        header = _Header(*_HEADER.unpack_from(stored))
    except struct.error as exc:
        raise CorruptObjectError(f"{name}: a block is truncated", object_id=name) from exc
    form, order, item_bytes, changed, first = header
    if (
        form not in (DENSE, SPARSE, SORTED)
        or order not in (INTEGERS, FLOATS)
        or item_bytes not in (1, 2, 4, 8)
        or raw_bytes % item_bytes
        or (form != SPARSE and (changed or first))
        or (form == SORTED and order != FLOATS)
        or first > len(stored) - _HEADER.size
        or changed > raw_bytes // item_bytes
    ):
        raise _misfit(name)
    return header


def _misfit(name: str) -> CorruptObjectError:
    return CorruptObjectError(f"{name}: a block of the codec `delta` is malformed, or does not fit its base", object_id=name)

"""The codec `delta`: what a block's elements differ by from those of an earlier one.

    form (1) | order (1) | item bytes (1) | zero (1) | changed (4) | bytes of the first planes (4) | planes | planes

A difference is one of integers: of floats, of those in the order of the floats, so that close numbers are close however their exponents
fall. Zigzag puts the sign lowest. Form 1, dense: the planes of all differences. Form 2, sparse: of the gaps between elements that
changed, u4 each, and of their differences. Form 3, sorted: the planes of all differences, stably sorted by the exponents of the base, whose
top byte after a rotation by one says them: an optimizer's steps are alike in size, so differences in units of the last place go by the
exponent, and zstd makes a new code for each 128 KiB.
"""

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.protocol import Buffer
from tensorstore_ck.codec.entropy import Coder, sample
from tensorstore_ck.codec.planes import BYTES, Elements, decode_planes, planes_bytes, planes_or_raw
from tensorstore_ck.codec.words import PIECE_BYTES, Words, bytes_of, words_of
from tensorstore_ck.errors import CorruptObjectError

DENSE, SPARSE, SORTED = 1, 2, 3
INTEGERS, FLOATS = 0, 1
SPARSE_TO: Final = 0.1
"""Of the elements that changed: at most so many for the sparse form."""
_HEADER: Final = struct.Struct("<BBBxII")
HEAD_BYTES: Final = _HEADER.size


def differences(words: Words, base: Words, *, is_float: bool) -> Words:
    """Zigzag differences; wraps round."""
    bits = 8 * words.dtype.itemsize
    signed = np.dtype(f"<i{words.dtype.itemsize}")
    found = np.empty_like(words)
    for piece, other, out in _pieces(words, base, found):
        difference = _ordered(piece, is_float=is_float) - _ordered(other, is_float=is_float)
        np.left_shift(difference, 1, out=out)
        np.bitwise_xor(out, (difference.view(signed) >> (bits - 1)).view(words.dtype), out=out)
    return found


def add_differences(base: Words, found: Words, into: Words, *, is_float: bool) -> None:
    """What `differences` took away."""
    for other, zigzag, out in _pieces(base, found, into):
        difference = (zigzag >> 1) ^ (0 - (zigzag & 1))
        out[:] = _ordered(_ordered(other, is_float=is_float) + difference, is_float=is_float)


def _ordered(words: Words, *, is_float: bool) -> Words:
    """Floats as integers in their order, in two's complement; its own inverse."""
    if not is_float:
        return words
    bits = 8 * words.dtype.itemsize
    sign: Words = (words.view(f"<i{words.dtype.itemsize}") >> (bits - 1)).view(words.dtype)
    found: Words = words ^ (sign & words.dtype.type((1 << (bits - 1)) - 1))
    return found


def delta_bytes(raw: memoryview, base: memoryview, elements: Elements) -> float:
    """What the difference of a block to another most likely takes."""
    some, other = (sample(words_of(each, elements.item_bytes)) for each in (raw, base))
    found = differences(some, other, is_float=elements.is_float)
    changed = np.count_nonzero(found) / max(1, len(found))
    if changed <= SPARSE_TO:
        return len(raw) * changed * (1 + 1 / elements.item_bytes)
    return planes_bytes(bytes_of(found), elements._replace(is_float=False)) * len(raw) / found.nbytes


def encode_delta(raw: memoryview, base: memoryview, elements: Elements, coder: Coder) -> list[bytes | memoryview]:
    """The pieces of the stored bytes."""
    order = FLOATS if elements.is_float else INTEGERS
    found = differences(words_of(raw, elements.item_bytes), words_of(base, elements.item_bytes), is_float=elements.is_float)
    plain = elements._replace(is_float=False)
    changed = np.flatnonzero(found)
    if len(changed) > SPARSE_TO * len(found):
        form = SORTED if elements.is_float else DENSE
        found = found[_by_exponent(words_of(base, elements.item_bytes))] if form == SORTED else found
        return [_HEADER.pack(form, order, elements.item_bytes, 0, 0), *planes_or_raw(bytes_of(found), plain, coder)]
    gaps = np.diff(changed, prepend=-1).astype("<u4")
    first = planes_or_raw(bytes_of(gaps), Elements(4, False), coder)
    second = planes_or_raw(bytes_of(found[changed]), plain, coder)
    header = _HEADER.pack(SPARSE, order, elements.item_bytes, len(changed), sum(map(len, first)))
    return [header, *first, *second]


def elements_of_delta(stored: Buffer) -> Elements:
    """What it is a difference of; `BYTES` where that is damaged."""
    order, item_bytes = stored[1], stored[2]
    return Elements(item_bytes, order == FLOATS) if item_bytes in (1, 2, 4, 8) else BYTES


def decode_delta(stored: memoryview, into: memoryview, base: memoryview, name: str) -> None:
    """The raw bytes, straight into their place.

    Raises:
        CorruptObjectError: it does not decode to so many.
    """
    try:
        form, order, item_bytes, changed, first = _HEADER.unpack_from(stored)
    except struct.error as exc:
        raise CorruptObjectError(f"{name}: a block is cut short", object_id=name) from exc
    rest, whole = stored[_HEADER.size :], len(into)
    if (
        form not in (DENSE, SPARSE, SORTED)
        or order not in (INTEGERS, FLOATS)
        or item_bytes not in (1, 2, 4, 8)
        or whole % item_bytes
        or len(base) != whole
        or (form != SPARSE and (changed or first))
        or first > len(rest)
        or changed > whole // item_bytes
    ):
        raise _misfit(name)
    dtype, is_float = np.dtype(f"<u{item_bytes}"), order == FLOATS
    if form != SPARSE:
        found = np.empty(whole // item_bytes, dtype)
        decode_planes(rest, bytes_of(found), name)
        if form == SORTED:
            ordered, found = found, np.empty_like(found)
            found[_by_exponent(words_of(base, item_bytes))] = ordered
        add_differences(words_of(base, item_bytes), found, words_of(into, item_bytes), is_float=is_float)
        return
    if not changed:
        into[:] = base
        return
    gaps, values = np.empty(changed, "<u4"), np.empty(changed, dtype)
    decode_planes(rest[:first], bytes_of(gaps), name)
    decode_planes(rest[first:], bytes_of(values), name)
    places: npt.NDArray[Any] = np.cumsum(gaps, dtype=np.int64) - 1
    if int(gaps.min()) == 0 or int(places[-1]) >= whole // item_bytes:
        raise _misfit(name)
    words = words_of(base, item_bytes).copy()
    picked = np.empty(changed, dtype)
    add_differences(words[places], values, picked, is_float=is_float)
    words[places] = picked
    into[:] = bytes_of(words)  # each word once: see `merge`


def _by_exponent(base: Words) -> npt.NDArray[np.intp]:
    """The order of elements by the exponents of others."""
    exponents = ((base << 1) >> (8 * base.dtype.itemsize - 8)).astype(np.uint8)
    return np.argsort(exponents, kind="stable")


def _misfit(name: str) -> CorruptObjectError:
    return CorruptObjectError(f"{name}: a block has a difference that does not fit its base", object_id=name)


def _pieces(*arrays: Words) -> Any:
    step = PIECE_BYTES // arrays[0].dtype.itemsize
    return (tuple(array[start : start + step] for array in arrays) for start in range(0, len(arrays[0]), step))

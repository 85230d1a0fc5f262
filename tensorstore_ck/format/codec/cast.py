"""The codec `cast`: 16-bit weights that are, bit for bit, the rounding of fp32 masters in the same snapshot take 8 bytes per block.

    kind (1) | zero (7)        bases: the blocks of the masters, which have the same elements in the same order

Rounding is to nearest, ties to even, as in torch and IEEE 754; in bfloat16 every NaN becomes 7FC0, on all machines.
"""

from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.format.codec.byte_split import words_of

KINDS: Final = {"bfloat16": 1, "float16": 2}
"""The dtypes that masters are rounded to. The numbers are format."""
PIECE_ELEMENTS: Final = 1 << 16
STORED_BYTES: Final = 8


def rounded(masters: npt.NDArray[np.uint32], kind: int) -> npt.NDArray[np.uint16]:
    """The bits of fp32 numbers rounded to 16 bits; `kind` as in `KINDS`."""
    if kind == KINDS["float16"]:
        with np.errstate(over="ignore"):
            return masters.view("<f4").astype("<f2").view("<u2")
    high = (masters + np.uint32(0x7FFF) + ((masters >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    is_nan = _is_nan(masters)
    if is_nan.any():
        high[is_nan] = 0x7FC0
    return high.astype("<u2")


def cast_sample(masters: memoryview, dtype: str) -> bytes:
    """The bytes of a few fp32 masters rounded to `dtype`."""
    return rounded(words_of(masters, 4), KINDS[dtype]).tobytes()


def encode_cast(raw: memoryview, masters: Iterable[memoryview], kind: int) -> bytes | None:
    """The stored bytes if `raw` is the rounding of the concatenated masters, else None."""
    words, start = words_of(raw, 2), 0
    for block in masters:
        if kind == KINDS["bfloat16"] and compiled.HAS_KERNEL:
            end = start + len(block) // 4
            if end > len(words) or not compiled.kernel.are_roundings(block, raw[2 * start : 2 * end]):
                return None
            start = end
            continue
        for piece in _pieces(words_of(block, 4)):
            if kind == KINDS["float16"] and _is_nan(piece).any():
                return None  # machines round its bits differently
            if not np.array_equal(rounded(piece, kind), words[start : start + len(piece)]):
                return None
            start += len(piece)
    return bytes([kind]).ljust(STORED_BYTES, b"\0") if start == len(words) else None


def decode_cast(stored: memoryview, into: memoryview, bases: Iterable[memoryview], name: str) -> None:
    """Writes the rounding of the masters (`bases`) to `into`.

    Raises:
        CorruptObjectError: `stored` is malformed, or the masters have another number of elements.
    """
    kind = stored[0] if len(stored) == STORED_BYTES else 0
    problem = kind not in KINDS.values() or len(into) % 2 or any(stored[1:])
    start = 0
    for block in bases if not problem else ():
        if len(block) % 4 or 2 * start + len(block) // 2 > len(into):
            problem = True
            break
        if kind == KINDS["bfloat16"] and compiled.HAS_KERNEL:
            end = start + len(block) // 4
            compiled.kernel.round_words(block, into[2 * start : 2 * end])
            start = end
            continue
        words: npt.NDArray[Any] = words_of(into, 2)
        for piece in _pieces(words_of(block, 4)):
            words[start : start + len(piece)] = rounded(piece, kind)
            start += len(piece)
    if problem or 2 * start != len(into):
        raise CorruptObjectError(f"{name}: a block of the codec `cast` does not fit its bases", object_id=name)


def _is_nan(words: npt.NDArray[np.uint32]) -> npt.NDArray[np.bool_]:
    is_nan: npt.NDArray[np.bool_] = (words & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return is_nan


def _pieces(words: npt.NDArray[Any]) -> Iterable[npt.NDArray[Any]]:
    return (words[start : start + PIECE_ELEMENTS] for start in range(0, len(words), PIECE_ELEMENTS))

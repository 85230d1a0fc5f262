"""Names and hashes: ULIDs name stored objects, BLAKE3 names content.

Knows no backend and no format. Storage keys are ULIDs, drawn once and never reused; content ids are 32-byte BLAKE3
hashes. A block id is the plain hash of the block's bytes, which ``b3sum`` recomputes; every other kind has its own derive-key
context, so that one kind never passes for another.
"""

import os
import re
import time
from collections.abc import Callable
from typing import Final, NewType

from blake3 import blake3

Digest = NewType("Digest", bytes)
"""A 32-byte BLAKE3 hash."""
Ulid = NewType("Ulid", bytes)
"""16 bytes: 48 bits of milliseconds since 1970, then 80 random bits. https://github.com/ulid/spec"""

DIGEST_BYTES: Final = 32
SERIES_BYTES: Final = 5
SHOWN_ROOT_DIGITS: Final = 12
"""Hex digits of a root in messages; 8 are enough for an address."""
ULID_BYTES: Final = 16
_SERIES_START: Final = 6
"""The offset after a ULID's milliseconds."""
ZERO_DIGEST: Final = Digest(bytes(DIGEST_BYTES))

_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [high + low for high in _CROCKFORD for low in _CROCKFORD]
"""The two digits of each number below 1,024."""
_TO_BASE_32 = bytes.maketrans(_CROCKFORD.encode(), b"0123456789ABCDEFGHIJKLMNOPQRSTUV")
"""From Crockford's digits to those that `int` reads."""
_ULID_TEXT = re.compile(r"[0-7][0-9A-HJKMNP-TV-Z]{25}")

Clock = Callable[[], int]
"""Returns nanoseconds since 1970."""
IdSource = Callable[[], Ulid]
Series = bytes
"""The first 40 of the 80 random bits of a ULID, which are equal in all names that one process draws for its saves."""


def new_ulid() -> Ulid:
    """A ULID from the system's clock and random source."""
    return Ulid((time.time_ns() // 1_000_000).to_bytes(6, "big") + os.urandom(10))


def ulid_text(ulid: Ulid) -> str:
    """The 26 characters of a ULID."""
    number = int.from_bytes(ulid, "big")
    text = ""
    for shift in range(120, -1, -10):
        text += _PAIRS[number >> shift & 1023]
    return text


def parse_ulid(text: str) -> Ulid | None:
    """The ULID that `text` spells, or None."""
    if not _ULID_TEXT.fullmatch(text):
        return None
    return Ulid(int(text.encode().translate(_TO_BASE_32), 32).to_bytes(ULID_BYTES, "big"))


def split_ulids(joined: bytes) -> list[Ulid]:
    """The ULIDs that were concatenated to `joined`."""
    return [Ulid(joined[at : at + ULID_BYTES]) for at in range(0, len(joined), ULID_BYTES)]


def series_of(ulid: Ulid) -> Series:
    """The series of a ULID; meaningful only if the store has a writer record of it."""
    return ulid[_SERIES_START : _SERIES_START + SERIES_BYTES]


def in_series(ulid: Ulid, series: Series) -> Ulid:
    """`ulid` with its series replaced."""
    return Ulid(ulid[:_SERIES_START] + series + ulid[_SERIES_START + SERIES_BYTES :])


def block_id(data: bytes | bytearray | memoryview) -> Digest:
    """The block id: BLAKE3-256 of the raw bytes."""
    return Digest(blake3(data).digest())


def derived_hash(kind: str, *pieces: bytes | memoryview) -> Digest:
    """BLAKE3 of `pieces` under the derive-key context of `kind`; the caller frames them (fixed width, or self-delimiting)."""
    hasher = blake3(derive_key_context=f"tensorstore_ck v1 {kind}")
    for piece in pieces:
        hasher.update(piece)
    return Digest(hasher.digest())

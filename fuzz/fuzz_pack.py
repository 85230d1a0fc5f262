"""Packs: the footer, and every block that it lists. An input is a pack, decoded as it is and once more under a right footer hash."""

from contextlib import suppress

import atheris
from _common import fuzz

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.common.ids import derived_hash
    from tensorstore_ck.errors import CorruptObjectError
    from tensorstore_ck.format.codec import decode
    from tensorstore_ck.format.pack import (
        BASE_DTYPE,
        ENTRY_DTYPE,
        FOOTER_MAGIC,
        HEADER,
        MAX_BLOCK_BYTES,
        TRAILER,
        decode_footer,
        footer_bytes,
    )


def read(data: bytes) -> None:
    size = footer_bytes(data[-TRAILER.size :], len(data), "a pack")
    footer = decode_footer(data[: HEADER.size], data[-size:], len(data), "a pack")
    for entry in footer.entries:
        start, stored, raw = int(entry["offset"]), int(entry["stored"]), int(entry["raw"])
        assert HEADER.size <= start <= start + stored <= len(data) - size
        with suppress(CorruptObjectError):
            assert len(decode(int(entry["codec"]), memoryview(data)[start : start + stored], raw, "a pack")) == raw


def sealed(data: bytes) -> bytes:
    """`data` with a trailer that fits it."""
    if len(data) < HEADER.size + TRAILER.size:
        return data
    entries, bases, *_ = TRAILER.unpack(data[-TRAILER.size :])
    table = entries * ENTRY_DTYPE.itemsize + bases * BASE_DTYPE.itemsize
    header, footer = data[: HEADER.size], data[max(len(data) - table - TRAILER.size, 0) : -TRAILER.size]
    counts = data[-TRAILER.size :][:16]
    return data[: -TRAILER.size] + TRAILER.pack(entries, bases, derived_hash("pack footer", header, footer, counts), FOOTER_MAGIC)


def target(data: bytes) -> None:
    with suppress(CorruptObjectError):
        read(data)
    read(sealed(data))


if __name__ == "__main__":
    fuzz("pack", target, peak_bytes=4 * MAX_BLOCK_BYTES)

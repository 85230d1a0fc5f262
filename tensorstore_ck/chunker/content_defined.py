"""Cuts opaque bytes (pickles of data loaders, tokenizers, long strings), whose content may shift between snapshots.

FastCDC 2020 (Xia et al., "The Design of Fast Content-Defined Chunking for Data Deduplication Based Storage Systems"), from a library.
The part records the lengths, so a version of the library that cuts elsewhere only costs deduplication.
"""

from typing import Final

OPAQUE_AVERAGE_BYTES: Final = 1 << 20
OPAQUE_MIN_BYTES: Final = 1 << 18
OPAQUE_MAX_BYTES: Final = 1 << 22


def cut_opaque(data: bytes | memoryview) -> list[int]:
    """The block lengths of `data` in bytes: one block up to 1 MiB; larger data is cut by content."""
    if not data:
        return []
    if len(data) <= OPAQUE_AVERAGE_BYTES:
        return [len(data)]
    from pyfastcdc import FastCDC  # noqa: PLC0415 - only large opaque values pay for the import

    cutter = FastCDC(OPAQUE_AVERAGE_BYTES, min_size=OPAQUE_MIN_BYTES, max_size=OPAQUE_MAX_BYTES)
    return [piece.length for piece in cutter.cut_buf(data)]

"""How a block's bytes are encoded in a pack. Pure; every codec is lossless and decodes into exactly the raw size.

`raw` stores a block as it is. `lz4` is for general bytes (layouts, opaque values); it falls back to `raw` where it gains
nothing. The numbers are format; unknown ones are refused by name.
"""

from enum import IntEnum

import lz4.block

from tensorstore_ck.backend.protocol import Buffer
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError


class Codec(IntEnum):
    """Codec numbers in extents and pack footers. 2 (planes), 3 (delta) and 4 (cast) are reserved."""

    RAW = 0
    LZ4 = 1


def encode_lz4(raw: Buffer) -> tuple[Codec, Buffer]:
    """`raw` through LZ4, or as it is when that is not smaller."""
    stored: bytes = lz4.block.compress(raw, store_size=False)
    return (Codec.LZ4, stored) if len(stored) < len(raw) else (Codec.RAW, raw)


def decode(codec: int, stored: memoryview, raw_bytes: int, name: str) -> memoryview:
    """The raw bytes of a block; its id is the caller's to check.

    Raises:
        CorruptObjectError: the stored bytes do not decode to `raw_bytes` bytes.
        FormatVersionError: a codec that this build does not know.
    """
    if codec == Codec.RAW:
        if len(stored) != raw_bytes:
            raise CorruptObjectError(f"{name}: a raw block has {len(stored)} bytes, not {raw_bytes}", object_id=name)
        return stored
    if codec == Codec.LZ4:
        try:
            raw = lz4.block.decompress(stored, uncompressed_size=raw_bytes)
        except (lz4.block.LZ4BlockError, ValueError, OverflowError) as exc:
            raise CorruptObjectError(f"{name}: a block does not decompress: {exc}", object_id=name) from exc
        if len(raw) != raw_bytes:
            raise CorruptObjectError(f"{name}: a block decompresses to {len(raw)} bytes, not {raw_bytes}", object_id=name)
        return memoryview(raw)
    raise FormatVersionError(f"{name} uses codec {codec}, which this build does not know: upgrade tensorstore_ck", object_id=name)

"""What each codec number means. Every codec is lossless and decodes into exactly the raw size.

`raw` stores a block as it is. `lz4` and `zstd` are for general bytes (layouts, opaque values), `planes` is for numbers. The numbers are
format; unknown ones are refused by name.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import lz4.block
import numpy as np
import zstandard

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
from tensorstore_ck.format.codec.byte_planes import Elements, decode_planes
from tensorstore_ck.format.codec.cast import decode_cast
from tensorstore_ck.format.codec.delta import decode_delta, elements_of_delta


class Codec(IntEnum):
    """Codec numbers in extents and pack footers."""

    RAW = 0
    LZ4 = 1
    PLANES = 2
    DELTA = 3
    CAST = 4
    ZSTD = 5


def codec_name(codec: int) -> str:
    """For users; also of one that this build does not know."""
    return Codec(codec).name.lower() if codec in set(Codec) else f"codec {codec}"


def encode_lz4(raw: Buffer) -> tuple[Codec, Buffer]:
    """`raw` through LZ4, or as it is when that is not smaller."""
    stored: bytes = lz4.block.compress(raw, store_size=False)
    return (Codec.LZ4, stored) if len(stored) < len(raw) else (Codec.RAW, raw)


def encode_zstd(raw: Buffer, level: int) -> tuple[Codec, Buffer]:
    """`raw` through zstd, or as it is when that is not smaller."""
    stored = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)
    return (Codec.ZSTD, stored) if len(stored) < len(raw) else (Codec.RAW, raw)


CODECS_WITH_BASES: Final = frozenset({Codec.DELTA, Codec.CAST})
"""Codecs of blocks that cannot be decoded without others."""


def base_count(codec: int, flags: int) -> int:
    """How many bases the extent of a block names; those of `cast` are counted in its flags."""
    return flags if codec == Codec.CAST else int(codec == Codec.DELTA)


def elements_in(codec: int, stored: Buffer) -> Elements:
    """The elements of a block with bases, by its first `delta.HEAD_BYTES`."""
    return Elements(2, is_float=True) if codec == Codec.CAST else elements_of_delta(stored)


def decode(
    codec: int,
    stored: memoryview,
    raw_bytes: int,
    name: str,
    into: memoryview | None = None,
    *,
    bases: Sequence[memoryview] = (),
) -> memoryview:
    """The raw bytes of a block; its id is the caller's to check. They may be `into`, where it is given, or somewhere else.

    `bases`: the raw bytes of those that it is encoded against.

    Raises:
        CorruptObjectError: the stored bytes do not decode to `raw_bytes` bytes.
        FormatVersionError: a codec that this build does not know.
    """
    if codec == Codec.RAW:
        raw = stored
    elif codec == Codec.LZ4:
        try:
            raw = memoryview(lz4.block.decompress(stored, uncompressed_size=raw_bytes))
        except (lz4.block.LZ4BlockError, ValueError, OverflowError) as exc:
            raise CorruptObjectError(f"{name}: a block does not decompress: {exc}", object_id=name) from exc
    elif codec == Codec.PLANES:
        raw = into if into is not None else memoryview(np.empty(raw_bytes, np.uint8))  # type: ignore[arg-type]
        decode_planes(stored, raw, name)
    elif codec in CODECS_WITH_BASES:
        raw = into if into is not None else memoryview(np.empty(raw_bytes, np.uint8))  # type: ignore[arg-type]
        if codec == Codec.CAST:
            decode_cast(stored, raw, bases, name)
        elif len(bases) != 1:
            raise CorruptObjectError(f"{name}: a block is a difference to another one, which is not at hand", object_id=name)
        else:
            decode_delta(stored, raw, bases[0], name)
    elif codec == Codec.ZSTD:
        raw = memoryview(_decode_zstd(stored, raw_bytes, name))
    else:
        raise FormatVersionError(f"{name} uses codec {codec}, which this build does not know: upgrade tensorstore_ck", object_id=name)
    if len(raw) != raw_bytes:
        raise CorruptObjectError(f"{name}: a block has {len(raw)} bytes, not {raw_bytes}", object_id=name)
    return raw


class StoredBlock(NamedTuple):
    """A block that was read, as it was stored."""

    codec: Codec
    stored: memoryview
    raw_bytes: int


def _decode_zstd(stored: memoryview, raw_bytes: int, name: str) -> bytes:
    try:
        declared = zstandard.frame_content_size(stored)
        if declared != raw_bytes:  # before memory is allocated for it
            raise CorruptObjectError(f"{name}: a block decompresses to {declared} bytes, not {raw_bytes}", object_id=name)
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise CorruptObjectError(f"{name}: a block does not decompress: {exc}", object_id=name) from exc

"""The codec numbers, and decoding by number. Every codec is lossless and decodes to exactly the raw size.

`raw` stores a block unencoded. `lz4` and `zstd` are for general bytes (layouts, opaque values), `planes` for numbers; `delta` and `cast`
need other blocks, their bases. The numbers are part of the format (FORMAT.md, "Packs").
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Final, NamedTuple

import lz4.block
import numpy as np
import zstandard

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.threads import Scratch
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
from tensorstore_ck.format.codec.byte_planes import Elements, decode_planes
from tensorstore_ck.format.codec.cast import decode_cast
from tensorstore_ck.format.codec.delta import decode_delta, elements_of_delta
from tensorstore_ck.format.codec.entropy import decompress


class Codec(IntEnum):
    """Codec numbers in extents and pack footers."""

    RAW = 0
    LZ4 = 1
    PLANES = 2
    DELTA = 3
    CAST = 4
    ZSTD = 5


def codec_name(codec: int) -> str:
    """The codec's name for users, even of a codec that this build does not know."""
    return Codec(codec).name.lower() if codec in set(Codec) else f"codec {codec}"


def encode_lz4(raw: Buffer) -> tuple[Codec, Buffer]:
    """`raw` compressed by LZ4, or unencoded if that is not smaller."""
    stored: bytes = lz4.block.compress(raw, store_size=False)
    return (Codec.LZ4, stored) if len(stored) < len(raw) else (Codec.RAW, raw)


def encode_zstd(raw: Buffer, level: int) -> tuple[Codec, Buffer]:
    """`raw` compressed by zstd, or unencoded if that is not smaller."""
    stored = zstandard.ZstdCompressor(level=level, write_content_size=True).compress(raw)
    return (Codec.ZSTD, stored) if len(stored) < len(raw) else (Codec.RAW, raw)


CODECS_WITH_BASES: Final = frozenset({Codec.DELTA, Codec.CAST})
"""Codecs whose blocks cannot be decoded without other blocks."""


def base_count(codec: int, flags: int) -> int:
    """How many bases the extent of a block has; `cast` counts them in its flags."""
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
    scratch: Scratch | None = None,
) -> memoryview:
    """The raw bytes of a block, in `into` (memory of `raw_bytes` bytes) or elsewhere. The caller checks the block's id.

    `bases` are the raw bytes of the blocks that this one is encoded against; `scratch` is memory to work in.

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
    elif codec == Codec.PLANES or codec in CODECS_WITH_BASES:
        raw = into if into is not None else memoryview(np.empty(raw_bytes, np.uint8))  # type: ignore[arg-type]
        if codec == Codec.PLANES:
            decode_planes(stored, raw, name)
        elif codec == Codec.CAST:
            decode_cast(stored, raw, bases, name)
        elif len(bases) != 1:
            raise CorruptObjectError(f"{name}: the delta base of a block is missing", object_id=name)
        else:
            decode_delta(stored, raw, bases[0], name, scratch=scratch)
    elif codec == Codec.ZSTD:
        raw = memoryview(decompress(stored, raw_bytes, name))
    else:
        raise FormatVersionError(f"{name} uses codec {codec}, which this build does not know: upgrade tensorstore_ck", object_id=name)
    if len(raw) != raw_bytes:
        raise CorruptObjectError(f"{name}: a block has {len(raw)} bytes, not {raw_bytes}", object_id=name)
    return raw


class StoredBlock(NamedTuple):
    """The stored bytes of a block, as read."""

    codec: Codec
    stored: memoryview
    raw_bytes: int

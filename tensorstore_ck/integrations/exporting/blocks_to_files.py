"""Bytes of stored tensors in ranges of files: verified before they are written, or copied and verified in the file.

A large raw block of a local store is copied from its pack to the file, by the kernel where it can, and read back only: what the file holds
is compared with the block's id, at once. So its bytes are hashed once, and while one thread writes, another one compares.
"""

import math
import threading
from collections.abc import Sequence
from functools import partial
from typing import Final, NamedTuple

from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.engine.read.block_reader import DISK_QUEUE, BufferTarget, WantedBlock, read_at_places, read_blocks
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.integrations.exporting.output_file import OutputFile, Piece
from tensorstore_ck.log import SnapshotRow

MIN_BYTES: Final = 1 << 20
"""Smaller blocks are read together."""
COPY_BYTES: Final = 1 << 20
"""The piece of a block that is copied at a time: it stays in a core's cache."""


class FileRange(NamedTuple):
    """Bytes [start, stop) of a stored tensor go to `offset` of a file."""

    start: int
    stop: int
    file: OutputFile
    offset: int


class RangesTarget(ByteTarget):
    """`ByteTarget` that writes the bytes of one tensor to several ranges."""

    def __init__(self, ranges: Sequence[FileRange]) -> None:
        self._ranges = ranges

    def memory(self) -> None:
        """None: bytes come through `write`."""

    def write(self, start: int, data: memoryview) -> None:
        """Writes verified bytes."""
        for target in self._ranges:
            first, last = max(start, target.start), min(start + len(data), target.stop)
            if first < last:
                target.file.write(target.offset + first - target.start, data[first - start : last - start])

    def whole(self, start: int, size: int) -> list[tuple[OutputFile, int]] | None:
        """Where each range takes these bytes; None if one takes only a part of them."""
        stop = start + size
        found = [target for target in self._ranges if target.start < stop and start < target.stop]
        if any(start < target.start or target.stop < stop for target in found):
            return None
        return [(target.file, target.offset + start - target.start) for target in found]


def read_or_copy(engine: Engine, info: SnapshotRow, wanted: Sequence[WantedBlock]) -> None:
    """As `read_blocks`, with its errors; copies what a `RangesTarget` can verify later."""
    is_local = engine.backend.is_local and engine.tier is None  # a block of a staging disk has another copy, which a read finds
    copied, read = list[WantedBlock](), list[WantedBlock]()
    for block in wanted:
        (copied if is_local and _can_be_copied(block) else read).append(block)
    read_blocks(engine, info, read)
    read_blocks(engine, info, copied, partial(_copy_blocks, info=info))


def _can_be_copied(block: WantedBlock) -> bool:
    target = block.target
    is_large = block.codec == Codec.RAW and block.raw >= MIN_BYTES
    return is_large and isinstance(target, RangesTarget) and target.whole(block.start, block.raw) is not None


def _copy_blocks(engine: Engine, wanted: Sequence[WantedBlock], *, info: SnapshotRow) -> None:
    if moved := [block for block in wanted if not _can_be_copied(block)]:  # and encoded by that, since the snapshot was opened
        read_at_places(engine, moved)
        wanted = [block for block in wanted if _can_be_copied(block)]
    buffers = threading.local()

    def copy(block: WantedBlock) -> None:
        if not hasattr(buffers, "piece"):
            buffers.piece = memoryview(bytearray(COPY_BYTES))
        assert isinstance(block.target, RangesTarget)
        places = block.target.whole(block.start, block.raw) or ()
        name = pack_name(block.pack)
        done = 0
        if engine.reads.rate == math.inf:
            path = f"{engine.backend.url}/{name}"  # elsewhere, where it was moved to a cold location: then nothing is copied
            done = min((file.copy_unhashed(path, block.offset, offset, block.raw) for file, offset in places), default=0)
        for at in range(done, block.raw, COPY_BYTES):
            piece = buffers.piece[: min(COPY_BYTES, block.raw - at)]
            engine.backend.read_into(name, block.offset + at, piece)
            for file, offset in places:
                file.write_unhashed(offset + at, piece)
        expected = block.source.part.block_id(block.row)
        for file, offset in places:
            file.compare(Piece(offset, block.raw, expected, partial(_read_verified, engine, info, block)))
        if engine.on_read is not None:
            engine.on_read(block.raw)

    for_each(wanted, copy, min(cpu_threads() + DISK_QUEUE, len(wanted)))


def _read_verified(engine: Engine, info: SnapshotRow, block: WantedBlock) -> memoryview:
    memory = memoryview(bytearray(block.raw))
    read_blocks(engine, info, [block._replace(start=0, target=BufferTarget(memory))])
    return memory

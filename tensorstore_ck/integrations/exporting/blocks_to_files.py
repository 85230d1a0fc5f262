"""Writes bytes of stored tensors to ranges of files: verified before they are written, or copied and verified in the file.

A tensor that is stored contiguously goes directly from blocks to the file. Sharded tensors are assembled in windows of memory.
Non-contiguous views are copied from a scratch file. So memory stays bounded for tensors of any size.

A large raw block of a local store is copied from its pack to the file, by the kernel where it can, and read back only: what the file holds
is compared with the block's id, at once. So its bytes are hashed once, and while one thread writes, another one compares.
"""

import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Final, NamedTuple

import torch

from tensorstore_ck.common.huge_pages import new_pages
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import ByteTarget, SnapshotContent, WantedBox
from tensorstore_ck.engine.read.block_reader import DISK_QUEUE, BufferTarget, WantedBlock, read_at_places, read_blocks
from tensorstore_ck.engine.read.snapshot_reader import MergedSnapshot
from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.format.layout import TensorSpec, dense_strides
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import Leaf
from tensorstore_ck.integrations.exporting.output_file import OutputFile, Piece
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.state.allocate import LeafForm, dtype_of, form_of, view_of
from tensorstore_ck.state.byte_sources import CopySource

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


def read_or_copy(engine: Engine, info: SnapshotInfo, wanted: Sequence[WantedBlock]) -> None:
    """As `read_blocks`; copies what a `RangesTarget` can verify later.

    Raises:
        DamageError: a block is missing, or one that was read is not what its id says.
    """
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


def _copy_blocks(engine: Engine, wanted: Sequence[WantedBlock], *, info: SnapshotInfo) -> None:
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


def _read_verified(engine: Engine, info: SnapshotInfo, block: WantedBlock) -> memoryview:
    memory = memoryview(bytearray(block.raw))
    read_blocks(engine, info, [block._replace(start=0, target=BufferTarget(memory))])
    return memory


WINDOW_BYTES: Final = 32 << 20
"""The bytes of one sharded tensor that are in memory at once."""
BATCH_BYTES: Final = 64 << 20
"""Windows that are read together."""


class ByteRouter:
    """Collects the ranges; `run` then writes them."""

    def __init__(self, content: SnapshotContent) -> None:
        self._content = content
        self._ranges: defaultdict[int, list[FileRange]] = defaultdict(list)
        self._strided: defaultdict[int, list[tuple[LeafForm, OutputFile, int]]] = defaultdict(list)

    def add(self, number: int, file: OutputFile, offset: int) -> None:
        """Adds all bytes of a stored tensor, in its memory order, at `offset`."""
        spec = self._content.layout.tensors[number]
        size = spec.size_bytes
        if size and spec.order:
            strides = dense_strides(spec.shape)
            shape, steps = (tuple(values[dim] for dim in spec.order) for values in (spec.shape, strides))
            self._strided[number].append((LeafForm(dtype_of(spec.dtype, spec.item_bytes), shape, steps, 0), file, offset))
        elif size:
            self._ranges[number].append(FileRange(0, size, file, offset))

    def add_leaf(self, leaf: Leaf, file: OutputFile, offset: int) -> None:
        """Adds the elements of a leaf, row-major, at `offset`."""
        form = form_of(self._content.layout, leaf)
        if is_contiguous(form):
            start, size = form.offset_bytes, size_bytes(form)
            if size:
                self._ranges[leaf.index].append(FileRange(start, start + size, file, offset))
        else:
            self._strided[leaf.index].append((form, file, offset))

    def run(self, scratch: str) -> None:
        """Writes everything; uses a temporary file `scratch` if needed."""
        _write_ranges(self._content, self._ranges)
        for number, wanted in self._strided.items():
            self._write_strided(number, wanted, scratch)

    def _write_strided(self, number: int, wanted: Sequence[tuple[LeafForm, OutputFile, int]], scratch: str) -> None:
        size = self._content.layout.tensors[number].size_bytes
        with OutputFile(scratch, "a scratch file") as file:
            file.unlink()
            _write_ranges(self._content, {number: [FileRange(0, size, file, 0)]})
            file.read_back([range(size)])
            base = torch.frombuffer(file.mapped(), dtype=torch.uint8)
            for form, target, offset in wanted:
                source, total = CopySource(view_of(base, form)), size_bytes(form)
                for start, stop in _windows(total, form.dtype.itemsize):
                    target.write(offset + start, source.read(start, stop))


def is_contiguous(form: LeafForm) -> bool:
    """Whether its elements are row-major without gaps."""
    compact = dense_strides(form.shape)
    return all(extent <= 1 or a == b for extent, a, b in zip(form.shape, form.strides, compact, strict=True))


def scratch_bytes(content: SnapshotContent, leaves: Iterable[Leaf]) -> int:
    """The size of the largest scratch file for these leaves."""
    strided = {leaf.index for leaf in leaves if not is_contiguous(form_of(content.layout, leaf))}
    return max((content.layout.tensors[number].size_bytes for number in strided), default=0)


def size_bytes(form: LeafForm) -> int:
    """The size of its elements."""
    return prod(form.shape) * form.dtype.itemsize


def _write_ranges(content: SnapshotContent, ranges: "dict[int, list[FileRange]]") -> None:
    spreads = content.layout.spreads
    whole: dict[int, ByteTarget] = {}
    shared: dict[int, RangesTarget] = {}
    for number, wanted in ranges.items():
        if isinstance(content, MergedSnapshot) or (spreads and spreads[number] is not None):
            shared[number] = RangesTarget(wanted)
        else:
            whole[number] = RangesTarget(wanted)
    content.read(whole)
    if shared:
        _write_windows(content, shared)


class _FileWindow(NamedTuple):
    fan: RangesTarget
    start: int
    memory: memoryview

    def write(self) -> None:
        self.fan.write(self.start, self.memory)


def _write_windows(content: SnapshotContent, fans: dict[int, RangesTarget]) -> None:
    memory = memoryview(new_pages(BATCH_BYTES))
    batch: list[_FileWindow] = []
    boxes: list[WantedBox] = []
    used = 0
    windows = [(number, *window) for number in fans for window in _element_windows(content.layout.tensors[number])]
    for number, first, last in [*windows, (-1, 0, BATCH_BYTES)]:
        spec = content.layout.tensors[number]
        if used + (last - first) * spec.item_bytes > BATCH_BYTES or number < 0:
            content.read_boxes(boxes)
            for_each(batch, _FileWindow.write, min(cpu_threads(), len(batch)))
            batch, boxes, used = [], [], 0
        if number < 0:
            return
        batch.append(_FileWindow(fans[number], first * spec.item_bytes, memory[used : used + (last - first) * spec.item_bytes]))
        for offsets, sizes in row_boxes(spec.shape, first, last):
            part = prod(sizes) * spec.item_bytes
            boxes.append(WantedBox(number, BoxBounds(offsets, sizes), BufferTarget(memory[used : used + part])))
            used += part


def _element_windows(spec: TensorSpec) -> Iterator[tuple[int, int]]:
    """Cuts a tensor's elements at block boundaries if possible: at multiples of a power of two of rows."""
    total = prod(spec.shape)
    row = prod(spec.shape[1:])
    rows = WINDOW_BYTES // (row * spec.item_bytes)
    step = (1 << rows.bit_length() - 1) * row if rows else WINDOW_BYTES // spec.item_bytes
    for first in range(0, total, step):
        yield first, min(first + step, total)


def _windows(total: int, item_bytes: int) -> Iterator[tuple[int, int]]:
    step = max(WINDOW_BYTES // 4 // item_bytes, 1) * item_bytes
    for start in range(0, total, step):
        yield start, min(start + step, total)

"""Writes bytes of stored tensors to ranges of files.

A tensor that is stored contiguously goes directly from blocks to the file. Sharded tensors are assembled in windows of memory.
Non-contiguous views are copied from a scratch file. So memory stays bounded for tensors of any size.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from operator import call
from typing import Final

import torch

from tensorstore_ck.common.huge_pages import new_pages
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.interfaces import SnapshotContent, WantedBox
from tensorstore_ck.engine.read.block_reader import BufferTarget
from tensorstore_ck.engine.read.snapshot_reader import MergedSnapshot
from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.format.layout import TensorSpec, dense_strides
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import Leaf
from tensorstore_ck.integrations.exporting.blocks_to_files import FileRange, RangesTarget
from tensorstore_ck.integrations.exporting.output_file import OutputFile
from tensorstore_ck.state.allocate import LeafForm, dtype_of, form_of, view_of
from tensorstore_ck.state.byte_sources import CopySource

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
                step = max(WINDOW_BYTES // 4 // form.dtype.itemsize, 1) * form.dtype.itemsize
                for start in range(0, total, step):
                    target.write(offset + start, source.read(start, min(start + step, total)))


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
    spreads, is_merged = content.layout.spreads, isinstance(content, MergedSnapshot)
    targets = {number: RangesTarget(wanted) for number, wanted in ranges.items()}
    shared = {number: target for number, target in targets.items() if is_merged or (spreads and spreads[number] is not None)}
    content.read({number: target for number, target in targets.items() if number not in shared})
    if shared:
        _write_windows(content, shared)


def _write_windows(content: SnapshotContent, fans: dict[int, RangesTarget]) -> None:
    memory = memoryview(new_pages(BATCH_BYTES))
    batch: list[Callable[[], None]] = []
    boxes: list[WantedBox] = []
    used = 0
    windows = [(number, *window) for number in fans for window in _element_windows(content.layout.tensors[number])]
    for number, first, last in [*windows, (-1, 0, BATCH_BYTES)]:
        spec = content.layout.tensors[number]
        if used + (last - first) * spec.item_bytes > BATCH_BYTES or number < 0:
            content.read_boxes(boxes)
            for_each(batch, call, min(cpu_threads(), len(batch)))
            batch, boxes, used = [], [], 0
        if number < 0:
            return
        batch.append(partial(fans[number].write, first * spec.item_bytes, memory[used : used + (last - first) * spec.item_bytes]))
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

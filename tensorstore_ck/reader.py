"""Reads one snapshot: record -> part -> ranges of packs, every block verified before its bytes count.

No global index. Reads are planned once, sorted by pack and offset, merged where the blocks are small or the backend is
remote, and go straight into the caller's memory where a block is stored raw.
"""

import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.chunker import cut_box
from tensorstore_ck.closure import require_live, resolve
from tensorstore_ck.codec import Codec, decode
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, DamageError, FormatVersionError
from tensorstore_ck.ids import block_id
from tensorstore_ck.layout import INLINE_TENSOR_BYTES, ByteTarget, Layout, TensorSpec, decode_layout
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.pack import pack_name
from tensorstore_ck.parallel import cpu_threads, for_each
from tensorstore_ck.part import Part, decode_values, part_name
from tensorstore_ck.record import Record

MERGE_BYTES: Final = 8 << 20
"""Neighbouring blocks are fetched together up to this size."""
DIRECT_BYTES: Final = 1 << 20
"""On a local backend a raw block of this size or more is read straight into its destination."""
MAX_GAP_BYTES: Final = 1 << 16
REMOTE_THREADS: Final = 8
DISK_QUEUE: Final = 2
"""Reads that wait for the disk while all cores hash: 0.5 instead of 1.1 s for 1 GiB that is not in the page cache."""


class _Wanted(NamedTuple):
    """One block to be read and where it goes."""

    row: int
    pack: int
    offset: int
    stored: int
    raw: int
    codec: int
    start: int
    target: ByteTarget


class SnapshotReader:
    """An opened snapshot: `layout.Content` over an engine. Thread-safe."""

    def __init__(self, engine: Engine, info: SnapshotInfo) -> None:
        self.info = info
        self._engine = engine
        try:
            self.record: Record = engine.read_record(info)
            self.part: Part = engine.read_part(self.record, 0)
            self._places = resolve(engine, engine.log.view(), self.part)
        except DamageError as exc:
            require_live(engine, info, exc)
            raise
        if len(self.record.parts) != 1:
            raise FormatVersionError(
                f"snapshot {info.root.hex()[:16]} was put by {len(self.record.parts)} ranks: upgrade tensorstore_ck to read it"
            )
        self.name = part_name(self.record.parts[0])
        self._blob_first = np.concatenate(([0], np.cumsum(self.part.blobs["blocks"], dtype=np.int64)))
        encoded = self._blob(0)
        if encoded[-32:] != self.part.layout_id:
            raise CorruptObjectError(f"{self.name}: its layout is not the one it names", object_id=self.name)
        self.layout: Layout = decode_layout(encoded, f"the layout of {self.name}")
        self.values: Sequence[Any] = decode_values(self.part, self.name)
        self._plan_blocks(self.layout.tensors)

    def _plan_blocks(self, tensors: Sequence[TensorSpec]) -> None:
        """Where each tensor's blocks begin in the extents, and each small one in the inline bytes."""
        target_bytes = self._engine.config.block_bytes
        self._sizes = [spec.size_bytes for spec in tensors]
        self._lengths: list[npt.NDArray[np.int64] | None] = []
        self._first: list[int] = []
        row, inline = int(self._blob_first[-1]), 0
        raw_bytes = self.part.extents["raw"]
        stored = raw_bytes[row : self.part.block_count]
        claimed = sum(size for size in self._sizes if size > INLINE_TENSOR_BYTES)
        if int(stored.sum(dtype=np.int64)) != claimed or (len(stored) and int(stored.max()) > target_bytes):
            raise CorruptObjectError(f"{self.name}: its blocks do not fit its layout", object_id=self.name)
        for spec, size in zip(tensors, self._sizes, strict=True):
            if size <= INLINE_TENSOR_BYTES:
                self._first.append(inline)
                self._lengths.append(None)
                inline += size
                continue
            lengths = block_lengths(spec, size, target_bytes)
            if not np.array_equal(raw_bytes[row : row + len(lengths)], lengths):
                raise CorruptObjectError(f"{self.name}: the blocks of tensor {spec.name!r} do not fit its shape", object_id=spec.name)
            self._first.append(row)
            self._lengths.append(lengths)
            row += len(lengths)
        if row != self.part.block_count or inline != len(self.part.inline):
            raise CorruptObjectError(f"{self.name}: its blocks do not fit its layout", object_id=self.name)

    def tensor_rows(self, tensor: int) -> range:
        """The extent rows of a tensor's blocks; empty for an inline one."""
        lengths = self._lengths[tensor]
        return range(0) if lengths is None else range(self._first[tensor], self._first[tensor] + len(lengths))

    def inline_bytes(self, tensor: int) -> bytes:
        """The bytes of a tensor that lies inside the part; empty for one that has blocks."""
        return (
            b"" if self._lengths[tensor] is not None else self.part.inline[self._first[tensor] : self._first[tensor] + self._sizes[tensor]]
        )

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""
        return self._blob(index + 1)  # the layout comes first

    def _blob(self, index: int) -> bytes:
        if not 0 <= index < len(self.part.blobs):
            raise CorruptObjectError(f"{self.name}: it has no large value {index}", object_id=self.name)
        rows = range(int(self._blob_first[index]), int(self._blob_first[index + 1]))
        size = int(self.part.blobs["size"][index])
        if int(self.part.extents["raw"][rows.start : rows.stop].sum(dtype=np.int64)) != size:
            raise CorruptObjectError(f"{self.name}: large value {index} does not have its size", object_id=self.name)
        memory = bytearray(size)
        self._read_rows(self._wanted(rows, 0, _Memory(memoryview(memory))))
        return bytes(memory)

    def read(self, targets: dict[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors, by their numbers in the layout."""
        wanted: list[_Wanted] = []
        for tensor, target in targets.items():
            if self._lengths[tensor] is not None:
                wanted += self._wanted(self.tensor_rows(tensor), 0, target)
            elif self._sizes[tensor]:
                _deliver(target, 0, memoryview(self.inline_bytes(tensor)))
        self._read_rows(wanted)

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        """Verified bytes [start, stop) of a tensor; reads only the blocks that hold them."""
        lengths = self._lengths[tensor]
        if lengths is None:
            return bytearray(self.inline_bytes(tensor)[start:stop])
        if stop <= start:
            return bytearray()
        ends = np.cumsum(lengths)
        first, last = int(np.searchsorted(ends, start, "right")), int(np.searchsorted(ends, stop, "left"))
        base = int(ends[first] - lengths[first])
        memory = bytearray(int(ends[last]) - base)
        row = self._first[tensor]
        self._read_rows(self._wanted(range(row + first, row + last + 1), 0, _Memory(memoryview(memory))))
        return memory[start - base : stop - base]

    def _wanted(self, rows: range, start: int, target: ByteTarget) -> list[_Wanted]:
        wanted = []
        for row, extent in zip(rows, self._places.extents[rows.start : rows.stop].tolist(), strict=True):
            pack, _, offset, stored, raw, base, codec, _ = extent
            if base != -1:
                raise FormatVersionError(f"{self.name} holds delta-coded blocks: upgrade tensorstore_ck", object_id=self.name)
            wanted.append(_Wanted(row, pack, offset, stored, raw, codec, start, target))
            start += raw
        return wanted

    def _read_rows(self, wanted: list[_Wanted]) -> None:
        """Reads blocks; those that were moved since this snapshot was opened are looked for where they are now."""
        while wanted:
            places = self._places
            try:
                self._read_at_places(wanted)
            except DamageError as exc:
                view = require_live(self._engine, self.info, exc)
                self._places = resolve(self._engine, view, self.part)
                before, now = places.extents, self._places.extents
                if all(places.packs[before[block.row]["pack"]] == self._places.packs[now[block.row]["pack"]] for block in wanted):
                    raise
                wanted = [_moved_to(block, now[block.row]) for block in wanted]
            else:
                return

    def _read_at_places(self, wanted: list[_Wanted]) -> None:
        local = self._engine.backend.is_local
        threads = cpu_threads() + DISK_QUEUE if local else REMOTE_THREADS
        wanted.sort(key=lambda block: (block.pack, block.offset))
        runs = list(_merge(wanted, direct=local))
        buffers = threading.local()

        def fetch(run: list[_Wanted]) -> None:
            self._fetch(run, buffers)

        for_each(runs, fetch, min(threads, len(runs)))

    def _fetch(self, run: list[_Wanted], buffers: threading.local) -> None:
        """Reads one merged range, verifies each block in it, and delivers it."""
        first, last = run[0], run[-1]
        name = pack_name(self._places.packs[first.pack])
        size = last.offset + last.stored - first.offset
        if len(run) == 1 and first.codec == Codec.RAW and (memory := first.target.memory()) is not None:
            place = memory[first.start : first.start + first.raw]
            self._engine.backend.read_into(name, first.offset, place)
            self._verify(first, place, name)
            return
        buffer = getattr(buffers, "buffer", None)
        if buffer is None or len(buffer) < size:
            buffer = buffers.buffer = bytearray(max(size, MERGE_BYTES if len(run) > 1 else size))
        fetched = memoryview(buffer)[:size]
        self._engine.backend.read_into(name, first.offset, fetched)
        for _, same in groupby(run, key=lambda block: block.offset):
            blocks = list(same)
            at = blocks[0].offset - first.offset
            raw = decode(blocks[0].codec, fetched[at : at + blocks[0].stored], blocks[0].raw, name)
            self._verify(blocks[0], raw, name)
            for block in blocks:
                if block.raw != blocks[0].raw or self.part.block_id(block.row) != self.part.block_id(blocks[0].row):
                    raise CorruptObjectError(f"{self.name}: two blocks claim one place in {name}", object_id=self.name)
                _deliver(block.target, block.start, raw)

    def _verify(self, block: _Wanted, raw: memoryview, name: str) -> None:
        if block_id(raw) != self.part.block_id(block.row):
            raise CorruptObjectError(
                f"{name}: the block at offset {block.offset} of {self.tensor_at(block.row)} does not match its hash: the pack was damaged; "
                "run `tsck fsck --read-data` to see what it hits, and restore an older snapshot",
                object_id=name,
            )

    def tensor_at(self, row: int) -> str:
        """What the block in an extent row belongs to, for messages."""
        for tensor, spec in enumerate(self.layout.tensors if hasattr(self, "_first") else ()):
            if row in self.tensor_rows(tensor):
                return f"tensor {spec.name!r}"
        return "a large value" if row >= int(self._blob_first[1]) else "the layout"


def block_lengths(spec: TensorSpec, size: int, target_bytes: int) -> npt.NDArray[np.int64]:
    """The grid of a whole tensor. Up to half the target it is one block, whatever the shape."""
    if size <= target_bytes // 2:
        return np.array([size], np.int64)
    return cut_box((0,) * len(spec.shape), spec.shape, spec.item_bytes, target_bytes)


def _moved_to(block: _Wanted, extent: np.void) -> _Wanted:
    pack, _, offset, stored, _, _, codec, _ = extent.item()
    return block._replace(pack=pack, offset=offset, stored=stored, codec=codec)


def _deliver(target: ByteTarget, start: int, raw: memoryview) -> None:
    memory = target.memory()
    if memory is None:
        target.write(start, raw)
    else:
        memory[start : start + len(raw)] = raw


def _merge(wanted: list[_Wanted], *, direct: bool) -> Iterator[list[_Wanted]]:
    """Groups sorted blocks that are worth fetching in one request."""
    run: list[_Wanted] = []
    for block in wanted:
        if run:
            first, last = run[0], run[-1]
            near = block.pack == last.pack and block.offset - last.offset - last.stored <= MAX_GAP_BYTES
            same = block.pack == last.pack and block.offset == last.offset
            alone = direct and block.raw >= DIRECT_BYTES
            if not same and (
                not near or alone or (last.raw >= DIRECT_BYTES and direct) or block.offset + block.stored - first.offset > MERGE_BYTES
            ):
                yield run
                run = []
        run.append(block)
    if run:
        yield run


class _Memory:
    """A `ByteTarget` over plain memory."""

    def __init__(self, view: memoryview) -> None:
        self._view = view

    def memory(self) -> memoryview:
        return self._view

    def write(self, start: int, data: memoryview) -> None:
        self._view[start : start + len(data)] = data

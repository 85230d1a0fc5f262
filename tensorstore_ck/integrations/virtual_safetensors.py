"""Virtual ``.safetensors`` files of a stored snapshot, whose bytes are generated on demand.

The header comes from the layout, the rest from verified blocks. Tensors are ordered by alignment, then as in the layout, so that a
sequential read of the file reads packs sequentially. A tensor with several names is repeated: the format has no aliases. Knows neither
torch nor paths nor fsspec.
"""

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from tensorstore_ck.chunker import cut_box
from tensorstore_ck.engine.interfaces import SnapshotContent, WantedBox
from tensorstore_ck.engine.read.block_reader import BufferTarget
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.format.layout import Layout, dense_strides
from tensorstore_ck.format.sharding import BoxBounds
from tensorstore_ck.format.tree import Container, Leaf, leaves, parse
from tensorstore_ck.format.values import decode, describe
from tensorstore_ck.integrations.model_file_names import is_model_file, stored_files
from tensorstore_ck.integrations.safetensors_format import METADATA, NUMPY_DTYPES, TORCH_DTYPES, file_shape
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.snapshot import Snapshot

MODEL: Final = "model.safetensors"
STATE: Final = "state.safetensors"
SNAPSHOT: Final = "snapshot.json"
FILES: Final = (MODEL, STATE, SNAPSHOT)
MODEL_KEY: Final = "model"
WINDOW_BYTES: Final = 32 << 20
"""The size of a sequential read: enough for all cores and connections."""
ALIGNMENT_BYTES: Final = 8
"""The alignment of the first tensor."""

_ITEM_BYTES: Final = {"F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}
"""Dtype of safetensors -> bytes of an element; of all others 1."""
_DTYPES: Final = {**TORCH_DTYPES, **{f"np:{'|' if kind.endswith('1') else '<'}{kind}": name for kind, name in NUMPY_DTYPES.items()}}
"""Stored dtype -> that of safetensors."""


class _BytesFile:
    """A small file that is in memory: see `SafetensorsFile` for its methods."""

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        self._data = data

    def read_into(self, start: int, target: memoryview) -> None:
        target[:] = self._data[start : start + len(target)]

    def window(self, position: int) -> tuple[int, int]:
        return 0, self.size


class _FileTensor(NamedTuple):
    leaf: Leaf
    start: int
    """The position in the file."""
    size: int
    shape: tuple[int, ...]
    item_bytes: int
    offset: int
    """Its start in the bytes of its base, if it is contiguous there."""
    strides: tuple[int, ...] | None
    """The strides in bytes of a view that is not contiguous."""


class SafetensorsFile:
    """A file of some tensors of a snapshot, all of dtypes that the format has. As thread-safe as its content."""

    def __init__(self, content: SnapshotContent, tensors: Mapping[str, Leaf], metadata: Mapping[str, str]) -> None:
        """`tensors`: by their names in the file. Raises `CorruptObjectError` if a view exceeds its base, or a dtype has a wrong size."""
        self._content = content
        header: dict[str, object] = {METADATA: dict(metadata)}
        entries = {name: _file_tensor(content.layout, leaf) for name, leaf in tensors.items()}
        end = 0
        for name, entry in sorted(entries.items(), key=lambda item: -item[1].item_bytes):
            dtype = _DTYPES[_stored_dtype(content.layout, entry.leaf)]
            header[name] = {"dtype": dtype, "shape": file_shape(dtype, entry.shape), "data_offsets": (end, end + entry.size)}
            entries[name] = entry._replace(start=end)
            end += entry.size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT_BYTES)
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + end
        filled = sorted((entry for entry in entries.values() if entry.size), key=lambda entry: entry.start)
        self._entries = [entry._replace(start=entry.start + len(self._head)) for entry in filled]
        self._starts = np.array([entry.start for entry in self._entries], np.int64)
        self._windows = np.array(list(_windows(len(self._head), self._entries)), np.int64)
        self._span: tuple[_FileTensor, bytearray] | None = None

    def window(self, position: int) -> tuple[int, int]:
        """The bytes [start, stop) around a position that should be read together: blocks end there, so none is read twice."""
        number = int(np.searchsorted(self._windows, position, "right"))
        return int(self._windows[number - 1]), int(self._windows[number]) if number < len(self._windows) else self.size

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills `target` with the bytes from `start` on, all within the file. Raises `DamageError` if a block is missing or damaged."""
        stop = start + len(target)
        head = self._head[start:stop]
        target[: len(head)] = head
        wanted: list[WantedBox] = []
        copies: list[tuple[memoryview, memoryview]] = []
        first = max(int(np.searchsorted(self._starts, start, "right")) - 1, 0)
        for entry in self._entries[first : int(np.searchsorted(self._starts, stop))]:
            begin, end = max(start, entry.start), min(stop, entry.start + entry.size)
            if begin < end:
                piece = target[begin - start : end - start]
                if entry.strides is None:
                    self._add(entry, start=begin - entry.start, piece=piece, wanted=wanted, copies=copies)
                else:
                    self._gather(entry, entry.strides, begin - entry.start, piece)
        self._content.read_boxes(wanted)
        for to, data in copies:
            to[:] = data

    def _add(
        self, entry: _FileTensor, start: int, piece: memoryview, wanted: list[WantedBox], copies: list[tuple[memoryview, memoryview]]
    ) -> None:
        """Requests the bytes of a tensor from `start` on; through a copy if they are not whole elements of its base."""
        base = self._content.layout.tensors[entry.leaf.index]
        begin = entry.offset + start
        first, last = begin // base.item_bytes, -(-(begin + len(piece)) // base.item_bytes)
        memory, skipped = piece, begin - first * base.item_bytes
        if skipped or (last - first) * base.item_bytes != len(piece):
            memory = memoryview(bytearray((last - first) * base.item_bytes))
            copies.append((piece, memory[skipped : skipped + len(piece)]))
        at = 0
        for offsets, sizes in row_boxes(base.shape, first, last):
            size = prod(sizes) * base.item_bytes
            wanted.append(WantedBox(entry.leaf.index, BoxBounds(offsets, sizes), BufferTarget(memory[at : at + size])))
            at += size

    def _gather(self, entry: _FileTensor, strides: tuple[int, ...], start: int, piece: memoryview) -> None:
        """Copies the elements of a strided view; keeps the bytes that it spans for sequential reads."""
        low, high = _byte_range(entry.shape, strides, entry.item_bytes)
        span = self._span
        if span is None or span[0] is not entry:
            data = self._content.read_range(entry.leaf.index, entry.offset + low, entry.offset + high)
            self._span = span = (entry, data)
        item = entry.item_bytes
        view = np.ndarray(entry.shape, f"V{item}", span[1], -low, strides)
        first, last = start // item, -(-(start + len(piece)) // item)
        data, at = bytearray((last - first) * item), 0
        for offsets, sizes in row_boxes(entry.shape, first, last):
            box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
            np.ndarray(sizes, f"V{item}", data, at)[...] = view[box]
            at += prod(sizes) * item
        piece[:] = memoryview(data)[start - first * item :][: len(piece)]


VirtualFile = SafetensorsFile | _BytesFile
"""Bytes that can be read from any position. Thread-safe."""


class SnapshotFiles:
    """The files of a snapshot."""

    def __init__(self, content: SnapshotContent) -> None:
        self._content = content
        layout = content.layout
        tree = parse(layout, len(content.values))
        all_leaves = list(leaves(tree))
        self._values = [leaf for leaf in all_leaves if leaf.kind == "value"]
        model = set[int]()
        for key, child in zip(tree.keys, tree.children, strict=False) if isinstance(tree, Container) else ():
            if key == MODEL_KEY and isinstance(child, Container):
                model = {id(leaf) for leaf in leaves(child)}
        tensors = [leaf for leaf in all_leaves if leaf.kind != "value"]
        if not any(id(leaf) in model for leaf in tensors):
            model = set()
        self._tensors: dict[str, dict[str, Leaf]] = {MODEL: {}, STATE: {}}
        self._left_out: dict[str, list[str]] = {MODEL: [], STATE: []}
        for leaf in tensors:
            name = leaf.path.removeprefix(f"{MODEL_KEY}.") if id(leaf) in model else leaf.path
            file = MODEL if id(leaf) in model or not model else STATE
            if _can_hold(layout, leaf, name):
                self._tensors[file][name] = leaf
            else:
                self._left_out[file].append(leaf.path)
        stored = stored_files(tree).items()
        self._small = {name: leaf for name, leaf in stored if is_model_file(name) and isinstance(leaf, Leaf) and leaf.kind == "value"}
        self.files = [*(name for name in FILES if name == SNAPSHOT or self._tensors.get(name)), *self._small]
        self._made: dict[str, VirtualFile] = {}

    def tensors(self, name: str, info: SnapshotRow) -> VirtualFile:
        """A file of tensors. Warns if it lacks some, which safetensors cannot hold; its metadata names those."""
        if name not in self._made:
            metadata = {"format": "pt", "root": info.root.hex(), "step": str(info.step)}
            if left_out := self._left_out[name]:
                metadata["left_out"] = json.dumps(left_out)
                shown = ", ".join(left_out[:8]) + (f" and {len(left_out) - 8} more" if len(left_out) > 8 else "")
                warnings.warn(
                    f"{name} lacks {shown}, which safetensors cannot hold: read them with checkout, or export as torch or dcp", stacklevel=2
                )
            self._made[name] = SafetensorsFile(self._content, self._tensors[name], metadata)
        return self._made[name]

    def model_file(self, name: str) -> VirtualFile:
        """A file next to the model's weights, such as ``config.json``."""
        if name not in self._made:
            leaf = self._small[name]
            data = decode(self._content.values[leaf.index], blob=self._content.blob, name=leaf.path)
            self._made[name] = _BytesFile(data if isinstance(data, bytes) else str(data).encode())
        return self._made[name]

    def about(self, info: SnapshotRow, metadata: Mapping[str, Any]) -> VirtualFile:
        """Everything else: the output of `tsck show`, and the names of tensors that no file holds."""
        snapshot = Snapshot.from_info(info)
        about = {key: getattr(snapshot, key) for key in ("root", "ref", "step", "time_ns", "parent", "mark", "reason")}
        about["metrics"] = _finite(snapshot.metrics)
        about["metadata"] = _finite(metadata)
        about["values"] = {leaf.path: describe(self._content.values[leaf.index]) for leaf in self._values}
        about["left_out"] = [*self._left_out[MODEL], *self._left_out[STATE]]
        return _BytesFile(json.dumps(about, indent=1).encode() + b"\n")


def _finite(value: Any) -> Any:
    """For JSON, which has no NaN."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else describe(value)


def _can_hold(layout: Layout, leaf: Leaf, name: str) -> bool:
    dtype = _DTYPES.get(_stored_dtype(layout, leaf))
    shape = tuple(leaf.node[3]) if leaf.kind == "view" else layout.tensors[leaf.index].shape
    return dtype is not None and file_shape(dtype, shape) is not None and name != METADATA


def _stored_dtype(layout: Layout, leaf: Leaf) -> str:
    dtype: str = leaf.node[2] if leaf.kind == "view" else layout.tensors[leaf.index].dtype
    return dtype


def _file_tensor(layout: Layout, leaf: Leaf) -> _FileTensor:
    """Where a leaf lies in its base; checks the numbers, which come from the store."""
    spec = layout.tensors[leaf.index]
    item_bytes = _ITEM_BYTES.get(_DTYPES[_stored_dtype(layout, leaf)], 1)
    if leaf.kind == "tensor":
        if item_bytes != spec.item_bytes:
            raise CorruptObjectError(f"a layout claims that {spec.dtype} has {spec.item_bytes} bytes; run `tsck fsck`", object_id=leaf.path)
        return _FileTensor(leaf, start=0, size=spec.size_bytes, shape=spec.shape, item_bytes=item_bytes, offset=0, strides=None)
    _, _, _, shape, steps, offset, _ = leaf.node
    strides = tuple(step * item_bytes for step in steps)
    low, high = _byte_range(shape, strides, item_bytes)
    if 0 in shape or offset + low < 0 or offset + high > spec.size_bytes:
        raise CorruptObjectError(f"view {leaf.path!r} does not lie within tensor {spec.name!r}; run `tsck fsck`", object_id=leaf.path)
    is_contiguous = all(extent == 1 or step == dense for extent, step, dense in zip(shape, steps, dense_strides(tuple(shape)), strict=True))
    size, gaps = prod(shape) * item_bytes, None if is_contiguous else strides
    return _FileTensor(leaf, start=0, size=size, shape=tuple(shape), item_bytes=item_bytes, offset=offset, strides=gaps)


def _byte_range(shape: Sequence[int], strides: Sequence[int], item_bytes: int) -> tuple[int, int]:
    """The start of a view's first byte and the end of its last, relative to its element 0."""
    reaches = [(extent - 1) * step for extent, step in zip(shape, strides, strict=True)]
    return sum(reach for reach in reaches if reach < 0), sum(reach for reach in reaches if reach > 0) + item_bytes


def _windows(head_bytes: int, entries: Iterable[_FileTensor]) -> Iterable[int]:
    """The starts of windows: the header alone; large tensors cut like blocks of window size; small tensors together."""
    yield 0
    yield head_bytes
    begun = at = head_bytes
    for entry in entries:
        if entry.leaf.kind == "tensor":
            lengths = cut_box((0,) * len(entry.shape), entry.shape, entry.item_bytes, WINDOW_BYTES).tolist()
        else:
            lengths = [min(WINDOW_BYTES, entry.size - start) for start in range(0, entry.size, WINDOW_BYTES)]
        for length in lengths:
            if at + length - begun > WINDOW_BYTES and at > begun:
                begun = at
                yield begun
            at += length

"""Folders of torch.distributed.checkpoint, as written by FileSystemWriter of torch 2.3 and newer.

``.metadata`` is a pickle of a few classes, read as `_Fields`; it lists the tensors, their pieces, and the position of each piece: a torch
file inside a file, which stays mapped. Other values are torch files, too. The tree is that of torch's own reader without a target state
(`_EmptyStateDictLoadPlanner`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, Final, NamedTuple, NoReturn

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.layout import MAX_DIMS, MAX_TENSOR_BYTES
from tensorstore_ck.format.sharding import BoxBounds, whole_box
from tensorstore_ck.integrations.importing.key_types import require_cheap_keys
from tensorstore_ck.integrations.importing.malformed import MalformedError, naming_file, printable
from tensorstore_ck.integrations.importing.mapped_files import Files, Folder, MappedFile
from tensorstore_ck.integrations.importing.pickle_allowlist import PickleAllowlist
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal, UnknownObject
from tensorstore_ck.integrations.importing.safe_unpickler import MAX_PICKLE_BYTES, safe_unpickle
from tensorstore_ck.integrations.importing.torch_file import load_torch_file
from tensorstore_ck.state.boxes import Box, Boxes, coverage_error
from tensorstore_ck.state.rank_shares import LocalPiece

METADATA: Final = ".metadata"
_CLASSES: Final = {
    "checkpoint.metadata": (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        "StorageMeta",
    ),
    "checkpoint.filesystem": ("_StorageInfo",),
    "checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem"),  # Megatron adds the plans of all ranks
    "_shard.sharded_tensor.metadata": ("TensorProperties",),  # of older torch
}
_OF_MEGATRON: Final = (("MCoreMetadata", "Metadata"), ("MCoreSavePlan", "SavePlan"))
"""Subclasses that Megatron-core 0.15 had."""
_ENUMS: Final = (
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
)
"""Their members are not needed."""
MAX_PIECES: Final = 1 << 16
MAX_PADDING: Final = 10_000_000
"""The most padding of all lists together: a path in the metadata can have any position."""


@dataclass(slots=True, eq=False, repr=False)
class _Fields:
    """An object of a DCP class: the name of its class, and its fields in the pickle."""

    kind: str
    named: dict[Any, Any] = field(default_factory=dict, init=False)  # a pickle passes what it likes
    items: tuple[Any, ...] = field(default=(), init=False)
    """The fields of the one class that pickles them without names."""

    def build(self, state: Any) -> None:
        if type(state) is dict:
            self.named = state
        elif type(state) is tuple:
            self.items = state
        else:
            raise MalformedError(f"its {self.kind} is malformed")

    def get(self, name: str, kind: type[Any]) -> Any:
        value = self.named.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise MalformedError(f"its {self.kind} has no valid {name}")
        return value


class _StoredChunk(NamedTuple):
    path: object
    """As in the metadata."""
    start: int
    size: int


class DcpContent(NamedTuple):
    """The content of a DCP folder."""

    state: dict[Any, Any]
    unknown: dict[str, str]
    """Names in its pickles that are not allowed -> the file."""
    left: dict[str, int]
    """Path of a file -> number of its bytes that no item uses."""
    attributes: dict[Any, Any]
    """Everything in its metadata."""


def load_dcp(files: Files, folder: Folder, known: PickleAllowlist) -> DcpContent:
    """The state in a folder with a ``.metadata``."""
    return _Reader(files, folder, known).read()


def _names() -> PickleAllowlist:
    names = {(f"torch.distributed.{module}", name): name for module, classes in _CLASSES.items() for name in classes}
    names |= {("megatron.core.dist_checkpointing.strategies.torch", name): kind for name, kind in _OF_MEGATRON}
    return PickleAllowlist(
        {
            **{(module, name): AllowedGlobal(name, partial(_Fields, kind)) for (module, name), kind in names.items()},
            **{name: AllowedGlobal(name[1], lambda number: None) for name in _ENUMS},
        }
    )


class _Reader:
    def __init__(self, files: Files, folder: Folder, known: PickleAllowlist) -> None:
        self._files, self._folder, self._known = files, folder, known
        self._mapped: dict[str, MappedFile] = {}
        self._chunks: dict[str, list[tuple[tuple[int, ...] | None, _StoredChunk]]] = {}
        self._unknown: dict[str, str] = {}
        self._left: dict[str, int] = {}

    def read(self) -> DcpContent:
        path = self._folder.join(METADATA)
        with naming_file(path, "DCP checkpoint"):
            metadata = self._metadata(path)
            entries = metadata.get("state_dict_metadata", dict)
            paths = metadata.named.get("planner_data")
            if paths is not None and type(paths) is not dict:
                self._unsupported(path, "has planner data of an unknown kind")
            self._chunks = self._locate(metadata.get("storage_data", dict), path)
            tree = _Tree()
            for name, entry in entries.items():
                if type(name) is not str or not isinstance(entry, _Fields):
                    raise MalformedError("its list of tensors is malformed")
                tree.set(paths[name] if paths and name in paths else (name,), self._value(name, entry))
        return DcpContent(tree.root, self._unknown, self._left, metadata.named)

    def _metadata(self, path: str) -> _Fields:
        file = self._files.map(path)
        if file.size > MAX_PICKLE_BYTES:
            raise MalformedError(f"its metadata takes {file.size} bytes")
        self._known.parsed_bytes += file.size
        metadata, end, unknown = safe_unpickle(file.data, _names())
        if isinstance(metadata, UnknownObject) or unknown:
            self._unsupported(path, f"names {', '.join(sorted(unknown)[:3])}, which torch.distributed.checkpoint does not use")
        if not isinstance(metadata, _Fields) or metadata.kind != "Metadata" or end != file.size:
            raise MalformedError("its metadata is of another kind, or something follows it")
        return metadata

    def _locate(self, storage: dict[Any, Any], path: str) -> dict[str, list[tuple[tuple[int, ...] | None, _StoredChunk]]]:
        """Name -> offsets and position of its pieces, or of its only item."""
        chunks: dict[str, list[tuple[tuple[int, ...] | None, _StoredChunk]]] = {}
        for index, info in storage.items():
            if not isinstance(index, _Fields) or not isinstance(info, _Fields):
                raise MalformedError("its list of positions is malformed")
            if info.named.get("transform_descriptors"):
                self._unsupported(path, "was written through an extension (such as compression)")
            offset = index.named.get("offset")
            if offset is not None and not isinstance(offset, torch.Size):
                raise MalformedError("its list of positions is malformed")
            start, size = info.get("offset", int), info.get("length", int)
            chunk = _StoredChunk(info.named.get("relative_path"), start, size)
            chunks.setdefault(index.get("fqn", str), []).append((None if offset is None else tuple(offset), chunk))
        return chunks

    def _value(self, name: str, entry: _Fields) -> Any:
        if entry.kind == "BytesStorageMetadata":
            positions = self._chunks.get(name, [])
            if len(positions) != 1:
                raise MalformedError(f"the value {printable(name)!r} has {len(positions)} positions")
            return self._item(positions[0][1])
        if entry.kind != "TensorStorageMetadata":
            raise MalformedError(f"{printable(name)!r} is neither a tensor nor a value")
        properties = entry.get("properties", _Fields).items
        dtype = properties[0] if properties else None
        shape, chunks = tuple(entry.get("size", torch.Size)), entry.get("chunks", list)
        if not isinstance(dtype, torch.dtype) or len(shape) > MAX_DIMS or not 0 <= _bytes(shape, dtype) <= MAX_TENSOR_BYTES:
            raise MalformedError(f"the tensor {printable(name)!r} has an impossible size or dtype")
        stored = self._chunks.get(name, [])
        require_cheap_keys([offsets for offsets, _ in stored])
        chunk_of = dict(stored)
        pieces = []
        for chunk in chunks:
            if not isinstance(chunk, _Fields):
                raise MalformedError(f"the tensor {printable(name)!r} has a malformed piece")
            box = BoxBounds(tuple(chunk.get("offsets", torch.Size)), tuple(chunk.get("sizes", torch.Size)))
            if 0 in box.sizes:
                continue  # from ranks that have nothing of it
            if box.offsets not in chunk_of:
                raise MalformedError(f"the piece at {list(box.offsets)[:8]} of {printable(name)!r} has no position")
            pieces.append(LocalPiece(box, self._piece(name, dtype, box, chunk_of[box.offsets])))
        return assembled(name, shape, dtype, pieces)

    def _piece(self, name: str, dtype: torch.dtype, box: BoxBounds, chunk: _StoredChunk) -> torch.Tensor:
        tensor = self._item(chunk)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != dtype or tuple(tensor.shape) != box.sizes:
            what = f"a tensor of {tensor.dtype} and shape {list(tensor.shape)[:8]}" if isinstance(tensor, torch.Tensor) else "no tensor"
            raise MalformedError(
                f"the metadata lists a piece of {printable(name)!r} with {dtype} and shape {list(box.sizes)[:8]}, but the file has {what}"
            )
        return tensor.detach()

    def _item(self, chunk: _StoredChunk) -> Any:
        file = self._mapped.get(chunk.path) if type(chunk.path) is str else None
        if file is None:
            file = self._mapped[str(chunk.path)] = self._files.map(self._folder.join(chunk.path))
        if not 0 <= chunk.start <= chunk.start + chunk.size <= file.size or chunk.size <= 0:
            raise MalformedError(f"it has an item of {chunk.size} bytes at byte {chunk.start} of {file.path}, which has {file.size}")
        left = self._left.setdefault(file.path, file.size)
        if chunk.size > left:
            raise MalformedError(f"its items in {file.path} overlap")
        self._left[file.path] = left - chunk.size
        value, unknown = load_torch_file(self._files, file=file, known=self._known, start=chunk.start, size=chunk.size)
        self._unknown.update(unknown)
        return value

    @staticmethod
    def _unsupported(path: str, what: str) -> NoReturn:
        raise UnsupportedValueError(f"{path} {what}, which is not supported: load it with torch, then store the state", object_id=path)


def assembled(name: str, shape: tuple[int, ...], dtype: torch.dtype, pieces: Sequence[LocalPiece]) -> torch.Tensor | Boxes:
    """The tensor of these pieces, which must cover it exactly once, for `state.capture`, like a rank's boxes of it.

    Each piece stays in its file, and the store gets the boxes, cut into the same blocks as in a save by the ranks that held them.
    """
    held = sorted((piece for piece in pieces if 0 not in piece.box.sizes), key=lambda piece: piece.box)
    problem = f"there are {len(held)} pieces" if len(held) > MAX_PIECES else coverage_error(shape, [piece.box for piece in held])
    if problem:
        raise MalformedError(f"{problem} of the tensor {printable(name)!r}, of shape {list(shape)[:8]}")
    if len(held) == 1 and held[0].box == whole_box(shape):
        return held[0].tensor
    if not held:
        return torch.empty(shape, dtype=dtype)
    return Boxes([Box(piece.tensor, shape, piece.box.offsets) for piece in held])


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    count = dtype.itemsize
    for extent in shape:
        if extent < 0:
            return -1
        count *= extent or 1
    return count


class _Tree:
    """The nested state, built from paths like torch.distributed.checkpoint._traverse.set_element."""

    def __init__(self) -> None:
        self.root: dict[Any, Any] = {}
        self._left = MAX_PADDING

    def set(self, path: Any, value: Any) -> None:
        """Sets a value at a path, in which text is a key and a number a list position."""
        if type(path) is not tuple or not path:
            raise MalformedError("it has an invalid path")
        if any(type(part) is not str and (type(part) is not int or part.bit_length() >= 64) for part in path):
            raise MalformedError("it has an invalid path")
        here: Any = self.root
        for part, below in pairwise(path):
            inner = self._get(here, part)
            if inner is None:
                inner = {} if type(below) is str else []
                self._put(here, part, inner)
            here = inner
        if self._get(here, path[-1]) is not None:
            raise MalformedError("its paths contradict each other")
        self._put(here, path[-1], value)

    @staticmethod
    def _get(container: Any, part: Any) -> Any:
        if type(container) is dict:
            return container.get(part)
        is_there = type(container) is list and type(part) is int and 0 <= part < len(container)
        return container[part] if is_there else None

    def _put(self, container: Any, part: Any, value: Any) -> None:
        if type(container) is dict:
            container[part] = value
        elif type(container) is list and type(part) is int and 0 <= part <= len(container) + self._left:
            padding = max(0, part + 1 - len(container))
            self._left -= padding
            container.extend([None] * padding)
            container[part] = value
        else:
            raise MalformedError("its paths contradict each other")

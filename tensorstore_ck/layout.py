"""The layout: which tensors a state has, and the tree of containers that they hang in.

Pure and free of torch. A layout is the same for all ranks of an SPMD job and from step to step: leaves that are not
tensors are holes in its tree, filled by the part's values. It is content-addressed and stored as blocks, so it costs its
bytes once. Also here: the two protocols by which bytes flow between memory and store (`ByteSource`, `ByteTarget`).

Tree nodes (``Node``), as msgpack:

    nil                                        a hole: the next of the part's values, in depth-first order
    int i                                      tensor i, with no flags
    ["t", i, flags]                            tensor i; flags: 1 requires_grad, 2 torch.nn.Parameter
    ["w", i, dtype, shape, strides, offset_bytes, flags]   a view into the memory of tensor i, strides in elements
    ["d", keys, nodes]                         dict; keys are encoded values
    ["o", keys, nodes, attributes]             OrderedDict; attributes: false, or the node of its ``_metadata``
    ["c", keys, nodes]                         collections.Counter
    ["f", factory, keys, nodes]                collections.defaultdict; factory: a name of `state.types`, or nil
    ["l", nodes]  ["u", nodes]                 list, tuple
    ["n", "module:qualname", fields, nodes]    namedtuple
    ["r", type_name, node]                     a registered type
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from tensorstore_ck.envelope import Body, object_hash, seal, take, unseal
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
from tensorstore_ck.ids import Digest

MAX_DIMS: Final = 64
MAX_NAME_BYTES: Final = 1024
MAX_TENSOR_BYTES: Final = 1 << 48
MAX_ITEM_BYTES: Final = 4096
INLINE_TENSOR_BYTES: Final = 4096
"""Tensors up to this size lie inside the part."""
INLINE_VALUE_BYTES: Final = 65536
"""Other values up to this size lie inside the part."""

Node = Any


class TensorSpec(NamedTuple):
    """One tensor with bytes of its own."""

    name: str
    """Path from the state's root: keys and positions joined by ``.``; unique in the layout."""
    dtype: str
    """A torch dtype's name without ``torch.``, or ``np:`` and a numpy dtype string."""
    item_bytes: int
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor, row-major and contiguous."""
        return prod(self.shape) * self.item_bytes


class SharedStorage(NamedTuple):
    """One allocation that holds several tensors side by side, so that a restore shares it again."""

    size_bytes: int
    tensors: tuple[int, ...]
    offsets_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The tensors, the tree they hang in, and the allocations they share."""

    tensors: Sequence[TensorSpec]
    tree: Node
    storages: Sequence[SharedStorage] = ()

    def encode(self) -> bytes:
        """The sealed layout object; its seal is the layout id."""
        dtypes = sorted({(spec.dtype, spec.item_bytes) for spec in self.tensors})
        number_of = {dtype: number for number, dtype in enumerate(dtypes)}
        return seal(
            "layout",
            {
                "names": [spec.name for spec in self.tensors],
                "dtypes": dtypes,
                "dtype_of": np.array([number_of[spec.dtype, spec.item_bytes] for spec in self.tensors], "<u2").tobytes(),
                "dims_of": np.array([len(spec.shape) for spec in self.tensors], "u1").tobytes(),
                "shapes": np.array([extent for spec in self.tensors for extent in spec.shape], "<i8").tobytes(),
                "storages": [list(storage) for storage in self.storages],
                "tree": self.tree,
                "mesh": None,
                "placements": None,
            },
        )


def layout_id(encoded: bytes) -> Digest:
    """The layout id of a sealed layout."""
    return object_hash(encoded)


def decode_layout(data: bytes, name: str) -> Layout:
    """Decodes and checks a sealed layout.

    Raises:
        CorruptObjectError: not a layout, or one that contradicts itself.
        FormatVersionError: a layout of many ranks, which this build does not read.
    """
    body = unseal("layout", data, name)
    if body.get("mesh") is not None or body.get("placements") is not None:
        raise FormatVersionError(f"{name} describes tensors spread over ranks: upgrade tensorstore_ck to read it", object_id=name)
    try:
        return _checked(body)
    except (KeyError, TypeError, ValueError, IndexError) as exc:
        raise CorruptObjectError(f"{name} is not a valid layout: {exc!r}", object_id=name) from exc


def _checked(body: Body) -> Layout:
    names = take(body, "names", list)
    dtypes = [_dtype(item) for item in take(body, "dtypes", list)]
    dtype_of = np.frombuffer(take(body, "dtype_of", bytes), "<u2").tolist()
    dims_of = np.frombuffer(take(body, "dims_of", bytes), "u1").tolist()
    extents = np.frombuffer(take(body, "shapes", bytes), "<i8").tolist()
    if not len(names) == len(dtype_of) == len(dims_of) or sum(dims_of) != len(extents):
        raise ValueError("its tables differ in length")
    if max(dims_of, default=0) > MAX_DIMS or min(extents, default=0) < 0 or len(set(names)) != len(names):
        raise ValueError("impossible shapes, or a name twice")
    tensors = []
    position = 0
    for tensor_name, dtype_number, dims in zip(names, dtype_of, dims_of, strict=True):
        if type(tensor_name) is not str or len(tensor_name) > MAX_NAME_BYTES:
            raise ValueError("a tensor's name is malformed")
        dtype, item_bytes = dtypes[dtype_number]
        spec = TensorSpec(tensor_name, dtype, item_bytes, tuple(extents[position : position + dims]))
        # Without its zeros: strides of an empty tensor must be computable as well.
        size = item_bytes * prod([extent or 1 for extent in spec.shape])
        if size > (MAX_TENSOR_BYTES if 0 not in spec.shape else (1 << 63) - 1):
            raise ValueError(f"tensor {tensor_name!r} is too large")
        tensors.append(spec)
        position += dims
    return Layout(tensors, body["tree"], _storages(take(body, "storages", list), tensors))


def _dtype(item: Any) -> tuple[str, int]:
    dtype, item_bytes = item
    if type(dtype) is not str or len(dtype) > 64 or type(item_bytes) is not int or not 0 < item_bytes <= MAX_ITEM_BYTES:
        raise ValueError("a dtype is malformed")
    return dtype, item_bytes


def _storages(items: list[Any], tensors: Sequence[TensorSpec]) -> list[SharedStorage]:
    storages = []
    placed: set[int] = set()
    for size, members, offsets in items:
        numbers = (size, *members, *offsets)
        if any(type(number) is not int for number in numbers) or min(numbers) < 0 or size > MAX_TENSOR_BYTES:
            raise ValueError("a shared storage is malformed")
        end = 0
        for offset, tensor in sorted(zip(offsets, members, strict=True)):
            if offset < end or tensor in placed:
                raise ValueError("tensors of a shared storage overlap")
            end = offset + tensors[tensor].size_bytes
            placed.add(tensor)
        if end > size:
            raise ValueError("a shared storage does not hold its tensors")
        storages.append(SharedStorage(size, tuple(members), tuple(offsets)))
    return storages


class ByteSource(Protocol):
    """The bytes of one tensor, row-major and contiguous, as they are captured."""

    def read(self, start: int, stop: int) -> memoryview:
        """Bytes [start, stop): the tensor's own memory where it is contiguous on the CPU, else a copy. Thread-safe."""


class ByteTarget(Protocol):
    """Where the bytes of one stored tensor go when it is restored."""

    def memory(self) -> memoryview | None:
        """All of the destination, writable, when bytes can be read straight into it; else None, and `write` is called."""

    def write(self, start: int, data: memoryview) -> None:
        """Takes the verified bytes from `start` on. Thread-safe; called once for every byte, in any order."""


class Captured(NamedTuple):
    """A state, taken apart: what a put stores."""

    layout: Layout
    values: Sequence[object]
    """msgpack-able; one for each hole of the tree. A large one is ``["b", kind, i]`` with its bytes in ``blobs[i]``."""
    blobs: Sequence[bytes]
    sources: Sequence[ByteSource]
    """One for each tensor of the layout."""


class Content(Protocol):
    """A stored snapshot, opened: what a restore takes."""

    @property
    def layout(self) -> Layout:
        """Its layout."""

    @property
    def values(self) -> Sequence[Any]:
        """The value of each hole, decoded from msgpack but not from our value encoding."""

    def blob(self, index: int) -> bytes:
        """The verified bytes of a large value."""

    def read(self, targets: dict[int, ByteTarget]) -> None:
        """Reads and verifies whole tensors, by their numbers in the layout."""

    def read_range(self, tensor: int, start: int, stop: int) -> bytearray:
        """Verified bytes [start, stop) of a tensor; reads only the blocks that hold them."""

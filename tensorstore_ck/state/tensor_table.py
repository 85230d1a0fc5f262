"""The tensors and arrays of a state, by number, as columns.

The caller waits while tens of thousands of tensors are captured, so most become only entries in lists: an object for each would cost
more, in garbage collection, than the queries to torch. The save makes `TensorSpecs` and `ByteSources` from the lists when it needs them.
`RecentLayouts` gives a state whose structure did not change the layout of an earlier save, with the write plan that was made from it.
"""

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from struct import Struct
from typing import Any, Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import torch

from tensorstore_ck.engine.interfaces import ByteSource, CapturedState, Numbers, SourceRanges, Sources
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.format.codec import compiled
from tensorstore_ck.format.layout import Layout, TensorSpec, dense_strides
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.format.tree import PARAMETER, REQUIRES_GRAD
from tensorstore_ck.state.aliasing import BOUNDS, Area, MemoryAreas
from tensorstore_ck.state.boxes import CHECKPOINTABLE_MARK
from tensorstore_ck.state.byte_sources import WRITABLE, Array, CopySource, MemorySource, memory_view
from tensorstore_ck.state.plain_memory import PLAIN
from tensorstore_ck.state.registered_types import DTYPE_NAMES

SMALL_BYTES: Final = 16 << 10
"""Without the kernel, smaller pieces keep the GIL: two threads exchanging it took three times as long for 20,000 copies of 256 bytes."""

MAX_TENSOR_BYTES: Final = (1 << 63) - 1

_PLACE: Final = Struct("=qq")
"""Of a tensor: its address, 0 if it is not contiguous host memory; and the number of its kind."""
_KIND: Final = Struct("=qq")
"""Of a kind: its bytes, and whether it is complex."""
_RULES: Final = (
    getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), torch.Tensor, torch.nn.Parameter, torch.Tensor.untyped_storage,
    torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes, torch.Tensor.is_neg, torch.Tensor.is_conj, hasattr, CHECKPOINTABLE_MARK,
    "dtype", "requires_grad",
)  # fmt: skip
"""What the kernel asks about each tensor, in the order of its `Rules`."""

_memmove, _memcmp = ctypes.CDLL(None).memmove, ctypes.CDLL(None).memcmp
_memmove_with_gil, _memcmp_with_gil = ctypes.PyDLL(None).memmove, ctypes.PyDLL(None).memcmp
for _functions, _result in ((_memmove, _memmove_with_gil), None), ((_memcmp, _memcmp_with_gil), ctypes.c_int):
    for _function in _functions:
        _function.argtypes, _function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], _result


def move(moves: Numbers) -> None:
    """Copies; `moves`: rows of a target address, a source address and a size in bytes. The caller keeps the memory alive."""
    if compiled.HAS_KERNEL:
        compiled.kernel.copy_memory(np.ascontiguousarray(moves, np.int64).data)
        return
    for target, address, size in zip(*moves.T.tolist(), strict=True):
        (_memmove if size > SMALL_BYTES else _memmove_with_gil)(target, address, size)


def differing(moves: Numbers) -> npt.NDArray[np.bool_]:
    """Whether the bytes at the two addresses differ, for each row as in `move`."""
    differs = np.zeros(len(moves), np.bool_)
    if compiled.HAS_KERNEL:
        compiled.kernel.compare_memory(np.ascontiguousarray(moves, np.int64).data, differs.data)
        return differs
    for row, (target, address, size) in enumerate(zip(*moves.T.tolist(), strict=True)):
        differs[row] = (_memcmp if size > SMALL_BYTES else _memcmp_with_gil)(target, address, size)
    return differs


def gather(addresses: Numbers, sizes: Numbers, read: Callable[[int], memoryview]) -> bytearray:
    """The bytes at these addresses, one piece after another; where an address is 0, what `read` returns for the position of the piece."""
    ends = np.cumsum(sizes)
    starts, joined = ends - sizes, bytearray(int(sizes.sum()))
    move(np.stack((starts + np.frombuffer(joined, np.uint8).ctypes.data, addresses, sizes), axis=1)[addresses != 0])
    target = memoryview(joined)  # takes no piece of another length
    for position in np.flatnonzero(addresses == 0).tolist():
        target[starts[position] : ends[position]] = read(position)
    return joined


class TensorKind(NamedTuple):
    """Common to all tensors of one dtype and shape."""

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    size_bytes: int
    """Bytes on this rank."""
    is_complex: bool = False
    order: tuple[int, ...] = ()
    """See `TensorSpec`."""
    strides: tuple[int, ...] | None = None
    """The row-major strides, if an extent of 1 makes torch accept other strides as contiguous."""


@dataclass(eq=False, repr=False)
class TensorSpecs(Sequence[TensorSpec]):
    """The `TensorSpec` of each tensor, made on first use."""

    names: Sequence[str]
    kinds: Sequence[TensorKind]
    kind_numbers: Numbers
    """Of each tensor, its kind among the `kinds`."""

    def pick(self, numbers: Sequence[int], names: Sequence[str], kinds: Sequence[TensorKind]) -> "TensorSpecs":
        """The tensors with these numbers, followed by others with `names` and `kinds`."""
        more = np.arange(len(self.kinds), len(self.kinds) + len(kinds))
        chosen = np.concatenate((self.kind_numbers[numbers], more))
        return TensorSpecs([*(self.names[number] for number in numbers), *names], [*self.kinds, *kinds], chosen)

    @overload
    def __getitem__(self, number: int) -> TensorSpec: ...
    @overload
    def __getitem__(self, number: slice) -> list[TensorSpec]: ...
    def __getitem__(self, number: int | slice) -> TensorSpec | list[TensorSpec]:
        return self._all[number]

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def _all(self) -> list[TensorSpec]:
        described = [(*kind[:3], kind.order) for kind in self.kinds]
        return [TensorSpec(name, *described[number]) for name, number in zip(self.names, self.kind_numbers.tolist(), strict=True)]


@dataclass(eq=False, repr=False)
class ByteSources(Sources):
    """The bytes of tensors."""

    addresses: Numbers
    """0 for tensors that are not contiguous host memory."""
    sizes: Numbers
    _owners: Sequence[object]
    """They keep the memory alive; one that is a tensor must be copied."""
    _made: dict[int, ByteSource]
    """Sources that exist already."""

    @classmethod
    def of(cls, sources: Sequence[ByteSource]) -> "ByteSources":
        """Other sources, as columns."""
        if isinstance(sources, ByteSources):
            return sources
        addresses = np.array([_address_of(source) for source in sources], np.int64)
        sizes = np.array([source.size_bytes for source in sources], np.int64)
        return cls(addresses, sizes, [None] * len(sizes), dict(enumerate(sources)))

    def pick(self, numbers: Sequence[int], more: Sequence[ByteSource]) -> "ByteSources":
        """The sources with these numbers, followed by `more`."""
        chosen, added = list(numbers), ByteSources.of(more)
        made = {position: self._made[number] for position, number in enumerate(chosen) if number in self._made}
        return ByteSources(
            np.concatenate((self.addresses[chosen], added.addresses)),
            np.concatenate((self.sizes[chosen], added.sizes)),
            [*(self._owners[number] for number in chosen), *added._owners],
            made | dict(enumerate(more, len(chosen))),
        )

    def owners(self, numbers: Sequence[int]) -> list[object]:
        """Objects that keep the memory of these tensors alive."""
        return [self._made.get(number, self._owners[number]) for number in numbers]

    def at(self, number: int) -> ByteSource:
        """See `Sources`."""
        if number in self._made:
            return self._made[number]
        owner = self._owners[number]
        if isinstance(owner, torch.Tensor):
            return self._made.setdefault(number, CopySource(owner))
        return MemorySource(int(self.addresses[number]), owner, int(self.sizes[number]))

    def read(self, number: int, start: int, stop: int) -> memoryview:
        """See `Sources`."""
        address = int(self.addresses[number])
        return memory_view(address + start, stop - start, WRITABLE) if address and start < stop else self.at(number).read(start, stop)

    def gather(self, ranges: SourceRanges) -> bytearray:
        """See `Sources`."""
        tensors, starts, sizes = ranges
        first = self.addresses[tensors]
        addresses = np.where(first != 0, first + starts, 0)
        return gather(addresses, sizes, lambda at: self.read(int(tensors[at]), int(starts[at]), int(starts[at] + sizes[at])))

    def __len__(self) -> int:
        return len(self.sizes)


class TensorTable:
    """Tensors and arrays, numbered from 0."""

    def __init__(self) -> None:
        self.number_of: dict[int, int] = {}
        """id(object) -> number: one object is restored as one object."""
        self.objects: list[torch.Tensor | Array] = []
        """Also keeps them alive, so that ids stay valid."""
        self.names: list[str] = []
        self.flags: dict[int, int] = {}
        """Number -> flags, if any."""
        self.areas = MemoryAreas()
        self.kinds: list[TensorKind] = []
        """Each once."""
        self._number_of_kind: dict[TensorKind, int] = {}
        self._known_kinds: dict[tuple[torch.dtype, tuple[int, ...]], int] = {}
        self._kind_facts = bytearray()
        """Rows of `_KIND`, one for each of the kinds."""
        self._places = bytearray()
        """Rows of `_PLACE`, one for each tensor."""
        self._owners: list[object] = []
        self._made: dict[int, ByteSource] = {}
        self._columns = (
            self.number_of, self.objects, self._owners, self.flags, dict[bytes, int](), self._kind_facts, self.areas.bounds, self._places
        )  # fmt: skip
        """What the kernel adds to, in the order of its `Columns`; without `_new_kind`, which would keep this object alive."""

    def add_run(self, items: list[Any], start: int) -> int:
        """Adds items from `start` on while they are new, dense, contiguous tensors; returns where that ends.

        The caller adds their `names`, and handles the item that ended the run.
        """
        if not compiled.HAS_KERNEL or _RULES[0] is None:
            return self._add_plain(items, start)
        columns = (*self._columns, self._new_kind)
        while True:
            stop = compiled.kernel.add_tensors(_RULES, columns, items, start)
            if stop == len(items) or (start := self._add_plain(items, stop, until_host=True)) == stop:
                return stop

    def _add_plain(self, items: list[Any], start: int, *, until_host: bool = False) -> int:
        """Adds ordinary tensors in host memory, as the kernel does, and on CUDA. `until_host`: ends after the first one in host memory."""
        objects, owners, places, bounds = self.objects, self._owners, self._places, self.areas.bounds
        number_of, known_kinds, kinds, mark = self.number_of, self._known_kinds, self.kinds, CHECKPOINTABLE_MARK
        position = start
        try:
            for position in range(start, len(items)):
                tensor = items[position]
                tensor_type, tensor_id = type(tensor), id(tensor)
                # Sparse, nested and other opaque tensors have no shape or no storage: torch raises.
                if (
                    tensor_type not in PLAIN
                    or tensor_id in number_of
                    or not tensor.is_contiguous()
                    or tensor.is_neg()
                    or hasattr(tensor, mark)
                ):
                    return position
                kind_number = known_kinds.get((tensor.dtype, tensor.shape))
                if kind_number is None and (kind_number := self._new_kind(tensor.dtype, tuple(tensor.shape))) is None:
                    return position
                kind, storage, is_on_host = kinds[kind_number], tensor.untyped_storage(), tensor.is_cpu
                if (kind.is_complex and tensor.is_conj()) or (kind.strides and tensor.stride() != kind.strides):
                    return position
                size, area = kind.size_bytes, storage.data_ptr()
                area_stop, address = area + storage.nbytes(), area + tensor.storage_offset() * kind.item_bytes
                if (size and address + size > area_stop) or not (is_on_host or tensor.is_cuda):
                    return position
                flags = (REQUIRES_GRAD if tensor.requires_grad else 0) | (PARAMETER if tensor_type is torch.nn.Parameter else 0)
                device = None if is_on_host else tensor.device
                number = number_of[tensor_id] = len(objects)
                objects.append(tensor)
                owners.append(storage if is_on_host else tensor)
                places += _PLACE.pack(address if is_on_host else 0, kind_number)
                bounds += BOUNDS.pack(area, area_stop if size else area)
                if flags:
                    self.flags[number] = flags
                if device is not None:
                    self.areas.devices[number] = device
                elif until_host:
                    return position + 1
        except RuntimeError:
            return position
        return len(items)

    def add(self, tensor: torch.Tensor | Array, spec: TensorSpec, source: ByteSource, area: Area, flags: int = 0) -> int:
        """Adds a described tensor or array, and returns its number."""
        kind = TensorKind(spec.dtype, spec.item_bytes, spec.shape, source.size_bytes, order=spec.order)
        if kind.size_bytes > MAX_TENSOR_BYTES:
            what = f"it has {kind.size_bytes} bytes, and a tensor can have {MAX_TENSOR_BYTES}; store what it was expanded from"
            raise UnsupportedValueError(f"cannot store {spec.name}: {what}", object_id=spec.name)
        kind_number, number = self._number_of(kind), len(self.objects)
        self.number_of[id(tensor)] = number
        self.objects.append(tensor)
        self._places += _PLACE.pack(_address_of(source), kind_number)
        if flags:
            self.flags[number] = flags
        self.names.append(spec.name)
        self.areas.append(area)
        self._owners.append(None)
        self._made[number] = source
        return number

    def kind_of(self, number: int) -> TensorKind:
        """The kind of one tensor."""
        kind_number: int = _PLACE.unpack_from(self._places, number * _PLACE.size)[1]
        return self.kinds[kind_number]

    def columns(self) -> tuple[TensorSpecs, ByteSources]:
        """What all tensors and arrays are, and their bytes."""
        addresses, kind_numbers = np.frombuffer(self._places, np.int64).reshape(-1, 2).T.copy()
        sizes = np.frombuffer(self._kind_facts, np.int64)[0::2][kind_numbers]
        return TensorSpecs(self.names, self.kinds, kind_numbers), ByteSources(addresses, sizes, self._owners, self._made)

    def _new_kind(self, dtype: torch.dtype, shape: tuple[int, ...]) -> int | None:
        """The number of a contiguous tensor's kind; None if its dtype has no stored form."""
        if dtype not in DTYPE_NAMES:
            return None
        strides = dense_strides(shape) if 1 in shape and len(shape) > 1 else None
        kind = TensorKind(
            DTYPE_NAMES[dtype], dtype.itemsize, shape, prod(shape) * dtype.itemsize, is_complex=dtype.is_complex, strides=strides
        )
        number = self._number_of(kind)
        return self._known_kinds.setdefault((dtype, shape), number)

    def _number_of(self, kind: TensorKind) -> int:
        if (known := self._number_of_kind.get(kind)) is not None:
            return known
        facts, number = _KIND.pack(kind.size_bytes, kind.is_complex), len(self.kinds)
        self.kinds.append(kind)
        self._kind_facts += facts
        self._number_of_kind[kind] = number
        return number


def _address_of(source: ByteSource) -> int:
    return source.address if isinstance(source, MemorySource) else 0


MAX_LAYOUTS: Final = 4


class RecentLayouts:
    """The layouts of a handle's last saves, with what is derived from them.

    Making the specs, the encoding and the write plan of 20,000 tensors costs more than reading their bytes, mostly for garbage collection.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[object, ...], tuple[Layout, dict[object, Any]]] = OrderedDict()
        """The last one last; each with its `CapturedState.derived`."""

    def reuse(self, captured: CapturedState) -> CapturedState:
        """The same state; with an equal layout that is kept, if there is one. Keeps its own layout otherwise.

        Raises:
            UnsupportedValueError: the layout cannot be stored.
        """
        layout, specs, own = captured.layout, captured.layout.tensors, captured.own and self.reuse(captured.own)
        if not isinstance(specs, TensorSpecs):
            return captured._replace(own=own)
        # The tree as bytes: 1, 1.0 and True are equal keys of a dict, but different ones of a layout.
        kinds, spreads = (tuple(specs.kinds), specs.kind_numbers.tobytes()), (tuple(layout.meshes), tuple(layout.spreads))
        key = (tuple(specs.names), kinds, pack_body(layout.tree), tuple(layout.storages), spreads)
        # Of threads that save at the same time each may keep a layout of its own: the last one counts.
        layout, derived = self._kept[key] = self._kept.pop(key, (layout, {}))
        if len(self._kept) > MAX_LAYOUTS:
            self._kept.popitem(last=False)
        return captured._replace(layout=layout, derived=derived, own=own)

"""Allocates new tensors and arrays for stored ones, with the same shared memory, and converts their dtype (``dtype=`` of a restore).

All sizes and strides come from a store, so they are checked here, before torch or numpy uses them. The caller reads the bytes.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from tensorstore_ck.common.host_memory import require_memory
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.layout import Layout, SharedStorage, TensorSpec, dense_strides
from tensorstore_ck.format.tree import PARAMETER, REQUIRES_GRAD, Leaf
from tensorstore_ck.format.values import numpy_dtype
from tensorstore_ck.state.aliasing import ALIGNMENT_BYTES, MAX_GAP_BYTES
from tensorstore_ck.state.byte_sources import Array, ByteSink, MemoryTarget, address_of, new_array, new_tensor, strided, target_of
from tensorstore_ck.state.registered_types import torch_dtype

CONVERTIBLE: Final = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    }
)
"""The dtypes that ``dtype=`` converts from and to. Not float8_e8m0fnu, which scales other numbers, nor float4, which packs two."""
_CPU: Final = torch.device("cpu")

TensorOrArray = torch.Tensor | Array
AnyDtype = torch.dtype | np.dtype[Any]


class LeafForm(NamedTuple):
    """The dtype and the memory layout of a leaf."""

    dtype: AnyDtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""
    offset_bytes: int
    """The offset in its base."""


def is_array(dtype: str) -> bool:
    """Whether a stored dtype is numpy's."""
    return dtype.startswith("np:")


@cache
def dtype_of(name: str, item_bytes: int | None) -> AnyDtype:
    """The torch or numpy dtype of a stored name; `item_bytes`, if stored, is checked.

    Raises:
        CorruptObjectError: there is no such numpy dtype on this machine, or its items have another size.
        UnsupportedValueError: this torch lacks the dtype.
    """
    dtype: AnyDtype
    if not is_array(name):
        dtype = torch_dtype(name)
    else:
        try:
            dtype = numpy_dtype(name[3:])
        except (ValueError, TypeError) as exc:
            raise CorruptObjectError(f"{name!r} is not a numpy dtype of this machine: {exc}", object_id=name) from exc
    if item_bytes not in (None, dtype.itemsize):
        raise CorruptObjectError(f"a layout claims that {name} takes {item_bytes} bytes; run `tsck fsck`", object_id=name)
    return dtype


def form_of(layout: Layout, leaf: Leaf) -> LeafForm:
    """The form of a tensor or view, checked to lie within its base."""
    spec = layout.tensors[leaf.index]
    if leaf.kind == "tensor":
        return LeafForm(dtype_of(spec.dtype, spec.item_bytes), spec.shape, dense_strides(spec.shape), 0)
    _, _, name, shape, strides, offset, _ = leaf.node
    form = LeafForm(dtype_of(name, None), tuple(shape), tuple(strides), offset)
    start, stop = byte_range(form)
    is_negative = isinstance(form.dtype, torch.dtype) and any(step < 0 for step in strides)
    is_permuted = [dim for dim in spec.order if spec.shape[dim] > 1] != [dim for dim in sorted(spec.order) if spec.shape[dim] > 1]
    if is_permuted or is_negative or 0 in shape or start < 0 or stop > spec.size_bytes:
        raise CorruptObjectError(f"view {leaf.path!r} does not lie within tensor {spec.name!r}; run `tsck fsck`", object_id=leaf.path)
    return form


def byte_range(form: LeafForm) -> tuple[int, int]:
    """The bytes [start, stop) of its base that the elements of a form span."""
    reaches = [(extent - 1) * step * form.dtype.itemsize for extent, step in zip(form.shape, form.strides, strict=True)]
    start, stop = (form.offset_bytes + sum(reach for reach in reaches if (reach > 0) == is_up) for is_up in (False, True))
    return start, stop + form.dtype.itemsize


def view_of(base: TensorOrArray, form: LeafForm) -> TensorOrArray:
    """A tensor or array of `form` over the memory of `base`, which is contiguous."""
    if isinstance(form.dtype, torch.dtype):
        if isinstance(base, np.ndarray):
            base = torch.from_numpy(base.reshape(-1).view(np.uint8))
        return strided(base, dtype=form.dtype, shape=form.shape, strides=form.strides, offset_bytes=form.offset_bytes)
    raw = base.detach().reshape(-1).view(torch.uint8).numpy() if isinstance(base, torch.Tensor) else base.reshape(-1).view(np.uint8)
    steps = [step * form.dtype.itemsize for step in form.strides]
    return np.ndarray(form.shape, form.dtype, raw.data, form.offset_bytes, steps)


WantedLeaf = tuple[Leaf, torch.dtype | None]
"""A leaf to allocate, and the dtype to convert it to if it holds floating-point numbers."""


def require_memory_for(layout: Layout, wanted: Collection[WantedLeaf], device: torch.device) -> None:
    """Checks that this host may have the memory for the tensors to allocate.

    Raises:
        NoSpaceError: it clearly has not; the message has both sizes.
    """
    numbers = {leaf.index for leaf, _ in wanted}
    specs = [layout.tensors[number] for number in numbers]
    needed_bytes = sum([spec.size_bytes for spec in specs if device == _CPU or is_array(spec.dtype)])
    for leaf, dtype in wanted:
        if dtype is not None and leaf.kind == "view":  # with overlapping strides, the converted copy may be larger than the base
            needed_bytes += prod(extent for extent, step in zip(leaf.node[3], leaf.node[4], strict=True) if step) * dtype.itemsize
    advice = "restore less of it (select=), into existing tensors (into=), or read tensors one by one (open_snapshot)"
    require_memory(needed_bytes, f"to make {len(numbers):,} tensors", advice)


class Targets(Mapping[int, ByteSink]):
    """The targets of new tensors by number, made when they are used: an object for each would wake the collector of garbage."""

    def __init__(self, sinks: Mapping[int, ByteSink | None], bases: Mapping[int, TensorOrArray]) -> None:
        self._sinks = sinks
        self._bases = bases

    def __getitem__(self, number: int) -> ByteSink:
        sink, base = self._sinks[number], self._bases[number]
        return (
            MemoryTarget(base.data_ptr(), base.nbytes, base) if sink is None and isinstance(base, torch.Tensor) else sink or target_of(base)
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._sinks)

    def __len__(self) -> int:
        return len(self._sinks)


class TensorAllocator:
    """Allocates tensors; the caller fills `targets` with bytes, and `get` then returns the tensors."""

    def __init__(self, layout: Layout, wanted: Iterable[WantedLeaf], device: torch.device) -> None:
        """`device` is for torch tensors; arrays, and tensors that share memory with arrays, are read on the CPU."""
        self._layout = layout
        self._device = device
        self._forms: dict[str, LeafForm] = {}
        """Path -> form, of leaves that are views, converted, or in a shared storage."""
        self._converted: dict[str, torch.dtype] = {}
        """Path -> the dtype that `get` converts to, for leaves whose base is read in its stored dtype."""
        self._bases: dict[int, TensorOrArray] = {}
        self._made: dict[tuple[int, int, torch.dtype | None], TensorOrArray] = {}
        self._sinks: dict[int, ByteSink | None] = {}
        """None: contiguous host memory."""
        in_storage = {number for storage in layout.storages for number in storage.tensors}
        shared: defaultdict[int, list[WantedLeaf]] = defaultdict(list)
        alone: dict[int, Leaf] = {}
        for leaf, dtype in wanted:
            if leaf.kind == "view" or dtype is not None or leaf.index in in_storage:
                shared[leaf.index].append((leaf, dtype))
            else:
                alone[leaf.index] = leaf
        for number in alone.keys() & shared.keys():
            shared[number].append((alone.pop(number), None))
        for number in alone:  # nearly all, in nearly all states
            self._add_plain(number, ())
        for wants in shared.values():
            self._forms |= {leaf.path: form_of(layout, leaf) for leaf, _ in wants}
        plain = {number: wants for number, wants in shared.items() if not self._add_converted(number, wants)}
        for storage in layout.storages:
            self._add_storage(storage, plain)
        for number, wants in plain.items():
            self._add_plain(number, wants)

    def _add_converted(self, number: int, wants: list[WantedLeaf]) -> bool:
        """Allocates a base in the wanted dtype if all its leaves agree on it; bytes are then converted as they arrive."""
        spec = self._layout.tensors[number]
        stored = dtype_of(spec.dtype, spec.item_bytes)
        for leaf, dtype in wants:
            if dtype is not None and self._forms[leaf.path].dtype in CONVERTIBLE and dtype != self._forms[leaf.path].dtype:
                self._converted[leaf.path] = dtype
        dtypes = {self._converted.get(leaf.path) for leaf, _ in wants}
        if dtypes == {None} or len(dtypes) > 1 or any(self._forms[leaf.path].dtype != stored for leaf, _ in wants):
            return False
        assert isinstance(stored, torch.dtype)
        dtype = self._converted[wants[0][0].path]
        self._add(number, _new(spec, dtype, self._device), stored)
        for leaf, _ in wants:
            form = self._forms[leaf.path]
            self._forms[leaf.path] = form._replace(dtype=dtype, offset_bytes=form.offset_bytes // stored.itemsize * dtype.itemsize)
            del self._converted[leaf.path]
        return True

    def _add_storage(self, storage: SharedStorage, plain: dict[int, list[WantedLeaf]]) -> None:
        """Allocates the needed bases of one storage, and no more of it than they need; removes them from `plain`."""
        offsets = {number: offset for number, offset in zip(storage.tensors, storage.offsets_bytes, strict=True) if number in plain}
        if len(offsets) <= 1 and not any(offset % ALIGNMENT_BYTES for offset in offsets.values()):
            return
        specs = {number: self._layout.tensors[number] for number in offsets}
        start = min(offsets.values()) // ALIGNMENT_BYTES * ALIGNMENT_BYTES
        size = max(offset + specs[number].size_bytes for number, offset in offsets.items()) - start
        if size > ALIGNMENT_BYTES + sum(self._layout.tensors[number].size_bytes + MAX_GAP_BYTES for number in storage.tensors):
            first = specs[min(specs)].name
            raise CorruptObjectError(f"the storage of tensor {first!r} is larger than its tensors; run `tsck fsck`", object_id=first)
        on_cpu = any(self._has_array(number, plain[number]) for number in offsets)
        memory = new_tensor((size,), torch.uint8, _CPU if on_cpu else self._device)
        for number, offset in offsets.items():
            self._add(number, _whole(specs[number], memory, offset - start))
            del plain[number]

    def _add_plain(self, number: int, wants: Sequence[WantedLeaf]) -> None:
        spec = self._layout.tensors[number]
        dtype = dtype_of(spec.dtype, spec.item_bytes)
        is_torch = isinstance(dtype, torch.dtype)
        if wants and any(isinstance(self._forms[leaf.path].dtype, torch.dtype) != is_torch for leaf, _ in wants):
            self._add(number, _whole(spec, new_tensor((spec.size_bytes,), torch.uint8, _CPU), 0))
        elif isinstance(dtype, torch.dtype):
            is_converted = bool(self._converted) and any(leaf.path in self._converted for leaf, _ in wants)
            self._add(number, _new(spec, dtype, _CPU if is_converted else self._device))
        else:
            array = new_array(spec.shape, dtype)
            self._add(number, array if not spec.order else view_of(array, LeafForm(dtype, spec.shape, spec.strides, 0)))

    def _has_array(self, number: int, wants: Sequence[WantedLeaf]) -> bool:
        dtypes = [self._forms[leaf.path].dtype for leaf, _ in wants]
        return is_array(self._layout.tensors[number].dtype) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes)

    def _add(self, number: int, base: TensorOrArray, stored: torch.dtype | None = None) -> None:
        self._bases[number] = base
        if not base.nbytes:
            return
        if stored is None and isinstance(base, torch.Tensor) and base.is_cpu and base.is_contiguous():
            self._sinks[number] = None  # new here, so it is plain and has its memory
        else:
            self._sinks[number] = target_of(base, stored)

    @property
    def targets(self) -> "Targets":
        """Where the bytes of each tensor go."""
        return Targets(self._sinks, self._bases)

    def addresses(self) -> dict[int, int]:
        """The host address of the first byte of each tensor in `targets`."""
        bases = {number: self._bases[number] for number in self._sinks}
        return {number: base.data_ptr() if isinstance(base, torch.Tensor) else address_of(base) for number, base in bases.items()}

    def get(self, leaf: Leaf) -> TensorOrArray:
        """The tensor or array of a wanted leaf; valid once the targets are filled. One stored tensor is one object."""
        made = self._bases[leaf.index]
        if type(leaf.node) is int and not self._converted and isinstance(made, torch.Tensor) and made.device == self._device:
            return made  # nearly always
        dtype = self._converted.get(leaf.path)
        key = (leaf.index, leaf.flags, dtype)
        if leaf.kind == "tensor" and key in self._made:
            return self._made[key]
        if leaf.kind == "view":
            made = view_of(made, self._forms[leaf.path])
        if isinstance(made, torch.Tensor):
            if dtype is not None:
                made = _converted(made, dtype)
            if made.device != self._device:
                made = made.to(self._device)
            made = with_flags(made, leaf)
        if leaf.kind == "tensor":
            self._made[key] = made
        return made


def with_flags(tensor: torch.Tensor, leaf: Leaf) -> torch.Tensor:
    """`tensor` with the leaf's flags: requires_grad, and as a Parameter."""
    flags = leaf.flags
    if flags and flags & REQUIRES_GRAD and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CorruptObjectError(f"{leaf.path!r} is stored as an integer tensor with a gradient; run `tsck fsck`", object_id=leaf.path)
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if flags else tensor


def _new(spec: TensorSpec, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new tensor in the stored memory order."""
    tensor = new_tensor(spec.shape, dtype, device)
    return strided(tensor, dtype=dtype, shape=spec.shape, strides=spec.strides, offset_bytes=0) if spec.order else tensor


def _whole(spec: TensorSpec, memory: torch.Tensor, offset: int) -> TensorOrArray:
    dtype = dtype_of(spec.dtype, spec.item_bytes)
    if isinstance(dtype, torch.dtype) and offset % dtype.itemsize:
        raise CorruptObjectError(f"tensor {spec.name!r} is misaligned in its storage; run `tsck fsck`", object_id=spec.name)
    return view_of(memory, LeafForm(dtype, spec.shape, spec.strides, offset))


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy in another dtype; elements that are repeated by strides of 0 stay repeated."""
    compact = tensor[tuple(slice(0, 1) if step == 0 else slice(None) for step in tensor.stride())]
    return compact.to(dtype).expand(tensor.shape)

"""Reads the bytes of tensors and arrays (`ByteSource`), and fills them with bytes (`ByteTarget`).

Contiguous CPU memory is read and written in place, by its address, which works for every dtype. Anything else is copied range by range,
so that no large tensor exists twice; from and to devices by `device/waited_copies.py`.
With `CopyTarget` a restore converts dtypes as the bytes arrive. Knows no states or trees.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from tensorstore_ck.engine.interfaces import ByteTarget
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.state.device.waited_copies import PieceCopy, copies_of, follow
from tensorstore_ck.state.plain_memory import is_dense, require_reachable

Array = npt.NDArray[Any]

WRITABLE: Final = 0x200  # PyBUF_WRITE
_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.restype = ctypes.py_object
_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
memory_view: Final[Callable[[int, int, int], memoryview]] = _from_memory
"""(address, size in bytes, `WRITABLE`) -> a view of that memory. For reads of many small tensors: `memory_at` also takes a size of 0."""

HUGE_FROM_BYTES: Final = 4 << 20
"""Allocations of at least this size request huge pages: filling 64 MiB of fresh memory then ran at 6 GB/s instead of 2.5."""
_MADV_HUGEPAGE: Final = 14
_PAGE_BYTES: Final = 4096
_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def memory_at(address: int, size: int) -> memoryview:
    """The `size` bytes at `address`, writable. Valid as long as their owner lives."""
    return memory_view(address, size, WRITABLE) if size else memoryview(bytearray())


class MemorySource:
    """`ByteSource` over contiguous CPU memory; keeps its owner alive."""

    __slots__ = ("_owner", "address", "size_bytes")

    def __init__(self, address: int, owner: object, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._owner = owner

    def read(self, start: int, stop: int) -> memoryview:
        """The memory itself; valid as long as this source lives."""
        return memory_view(self.address + start, stop - start, WRITABLE) if start < stop else memoryview(bytearray())


class BytesSource:
    """`ByteSource` over bytes."""

    __slots__ = ("_data", "size_bytes")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size_bytes = len(data)

    def read(self, start: int, stop: int) -> memoryview:
        """The bytes themselves."""
        return memoryview(self._data)[start:stop]


class CopySource:
    """`ByteSource` over any other tensor or array: each range is copied."""

    __slots__ = ("_item_bytes", "size_bytes", "tensor")

    def __init__(self, tensor: torch.Tensor | Array) -> None:
        if isinstance(tensor, torch.Tensor):
            require_reachable(tensor)
        self.tensor = bits_of(tensor.detach()) if isinstance(tensor, torch.Tensor) else tensor
        self._item_bytes = self.tensor.itemsize
        self.size_bytes = tensor.nbytes

    def read(self, start: int, stop: int) -> memoryview:
        """A copy of the bytes."""
        item_bytes = self._item_bytes
        first, last = start // item_bytes, -(-stop // item_bytes)
        if isinstance(self.tensor, torch.Tensor) and self.tensor.is_cuda:
            several = [PieceCopy(part, part.numel() * item_bytes) for part in _parts(self.tensor, first, last)]
            fetched = copies_of(self.tensor.device).fetch(several)
            return fetched[start - first * item_bytes : stop - first * item_bytes]
        copy = bytearray((last - first) * item_bytes)
        position = 0
        for index, count in pieces(tuple(self.tensor.shape), first, last):
            target = memoryview(copy)[position * item_bytes : (position + count) * item_bytes]
            if isinstance(self.tensor, torch.Tensor):
                piece = self.tensor[index]
                torch.frombuffer(target, dtype=piece.dtype).view(piece.shape).copy_(piece)
            else:
                np.ndarray(np.shape(self.tensor[index]), self.tensor.dtype, target)[...] = self.tensor[index]
            position += count
        return memoryview(copy)[start - first * item_bytes : stop - first * item_bytes]


class MemoryTarget(ByteTarget):
    """`ByteTarget` over contiguous CPU memory."""

    __slots__ = ("_address", "_owner", "_size")

    def __init__(self, address: int, size: int, owner: object) -> None:
        self._address = address
        self._size = size
        self._owner = owner

    def memory(self) -> memoryview:
        """All of it."""
        return memory_view(self._address, self._size, WRITABLE) if self._size else memoryview(bytearray())

    def write(self, start: int, data: memoryview) -> None:
        """Copies `data` in."""
        self.memory()[start : start + len(data)] = data


class CopyTarget(ByteTarget):
    """`ByteTarget` over any other tensor or array: on a device, of another dtype, or strided. Takes whole elements."""

    __slots__ = ("_dtype", "_item_bytes", "_shape", "_tensor")

    def __init__(self, tensor: torch.Tensor | Array, stored: torch.dtype | None = None) -> None:
        """`stored` is the dtype of the bytes; None: the tensor's own."""
        if isinstance(tensor, torch.Tensor):
            tensor = tensor.detach()
            self._dtype = stored or tensor.dtype
            if self._dtype == tensor.dtype:
                tensor = bits_of(tensor)
                self._dtype = tensor.dtype
        self._tensor = tensor
        self._item_bytes = self._dtype.itemsize if isinstance(tensor, torch.Tensor) else tensor.itemsize
        self._shape = tuple(tensor.shape)

    def memory(self) -> None:
        """None: bytes must come through `write`."""

    def window(self, size_bytes: int) -> memoryview | None:
        """Pinned memory, if the tensor is on a device."""
        tensor = self._tensor
        return copies_of(tensor.device).window(size_bytes) if isinstance(tensor, torch.Tensor) and tensor.is_cuda else None

    def write(self, start: int, data: memoryview) -> None:
        """Copies, converts and moves `data`, which begins and ends with an element."""
        item_bytes = self._item_bytes
        first = start // item_bytes
        last, position = first + len(data) // item_bytes, 0
        if isinstance(self._tensor, torch.Tensor):
            with torch.inference_mode(self._tensor.is_inference()):
                for target in _parts(self._tensor, first, last):
                    until = position + target.numel() * item_bytes
                    if target.is_cuda:
                        copies_of(target.device).fill(target, _frombuffer(data[position:until], self._dtype))
                    else:
                        target.copy_(_frombuffer(data[position:until], self._dtype).view(target.shape))
                    position = until
            return
        for index, count in pieces(self._shape, first, last):
            piece = data[position * item_bytes : (position + count) * item_bytes]
            self._tensor[index] = np.frombuffer(piece, self._tensor.dtype).reshape(np.shape(self._tensor[index]))
            position += count


ByteSink = MemoryTarget | CopyTarget


def source_of(tensor: torch.Tensor | Array) -> MemorySource | CopySource:
    """The bytes of a tensor or array. Raises `UnsupportedValueError` if it is a tensor that is not plain and strided with its memory."""
    if isinstance(tensor, torch.Tensor):
        require_reachable(tensor)
        if tensor.is_cpu and is_dense(tensor):
            return MemorySource(tensor.data_ptr(), tensor.untyped_storage(), tensor.nbytes)
        follow(tensor)
    elif tensor.flags.c_contiguous:
        return MemorySource(address_of(tensor), tensor, tensor.nbytes)
    return CopySource(tensor)


def target_of(tensor: torch.Tensor | Array, stored: torch.dtype | None = None) -> ByteSink:
    """The target that fills `tensor` with bytes of the dtype `stored` (None: its own), in place if possible.

    Raises:
        UnsupportedValueError: `tensor` is not a plain strided tensor with its memory.
    """
    if isinstance(tensor, torch.Tensor):
        require_reachable(tensor)
        if tensor.is_cpu and is_dense(tensor) and stored in (None, tensor.dtype):
            return MemoryTarget(tensor.data_ptr(), tensor.nbytes, tensor)
        follow(tensor)
        return CopyTarget(tensor, stored)
    if tensor.flags.c_contiguous:
        return MemoryTarget(address_of(tensor), tensor.nbytes, tensor)
    return CopyTarget(tensor)


def pieces(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Any, int]]:
    """Covers elements [start, stop) of a row-major tensor by boxes, in order: an index for `tensor[...]`, and its number of elements."""
    for offsets, sizes in row_boxes(shape, start, stop):
        yield tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)), prod(sizes)


def _parts(tensor: torch.Tensor, first: int, last: int) -> Iterator[torch.Tensor]:
    """Elements [first, last) of a tensor, in order, as views: one of a dense tensor."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[first:last]
        return
    for index, _ in pieces(tuple(tensor.shape), first, last):
        yield tensor[index]


_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers, if possible: torch cannot copy every dtype. Complex128 has one more dim, of two integers.

    torch's copies of complex128 crash at an address that is no multiple of 16, such as that of a file's bytes.
    """
    if tensor.is_conj() or tensor.is_neg():
        return tensor
    if tensor.dtype is torch.complex128:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_BITS[tensor.itemsize]) if tensor.itemsize in _BITS else tensor


def address_of(array: Array) -> int:
    """The address of an array's first element."""
    return int(array.__array_interface__["data"][0])


def _frombuffer(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    if data.readonly:  # torch would warn
        data = memory_at(address_of(np.frombuffer(data, np.uint8)), len(data))
    return torch.frombuffer(data, dtype=dtype)


def new_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A new, uninitialized, contiguous tensor."""
    if dtype.is_complex and dtype.itemsize == 4:  # torch warns when such a tensor is made directly
        tensor = torch.empty(shape, dtype=torch.int32, device=device).view(dtype)
    else:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.nbytes >= HUGE_FROM_BYTES and tensor.is_cpu:
        _ask_for_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """A new, uninitialized, contiguous array."""
    array = np.empty(shape, dtype)
    if array.nbytes >= HUGE_FROM_BYTES:
        _ask_for_huge_pages(address_of(array), array.nbytes)
    return array


def _ask_for_huge_pages(address: int, size: int) -> None:
    if _madvise is not None:
        start = -(-address // _PAGE_BYTES) * _PAGE_BYTES
        _madvise(start, (address + size) // _PAGE_BYTES * _PAGE_BYTES - start, _MADV_HUGEPAGE)  # only advice: failure is harmless


def strided(base: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], offset_bytes: int) -> torch.Tensor:
    """A new tensor over the memory of `base`, which begins at its storage's offset. The caller checks bounds."""
    start = base.storage_offset() * base.itemsize + offset_bytes
    if start % dtype.itemsize:
        raise CorruptObjectError(f"a stored view of {dtype} begins at the misaligned byte {start} of its storage; run `tsck fsck`")
    return new_tensor((0,), dtype, base.device).set_(base.untyped_storage(), start // dtype.itemsize, shape, strides)

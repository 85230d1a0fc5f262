"""The addresses of tensors and arrays, for `aliasing`."""

from collections.abc import Sequence

import numpy as np
import torch

from tensorstore_ck.state.aliasing import Area, Extent
from tensorstore_ck.state.byte_sources import Array, address_of
from tensorstore_ck.state.plain_memory import is_dense, span_of


def area_of(tensor: torch.Tensor | Array) -> Area:
    """The allocation of a tensor or array; None if it has no bytes."""
    if not tensor.nbytes:
        return None
    if isinstance(tensor, np.ndarray):
        extent = extent_of(tensor)
        return None, extent.area_start, extent.area_stop, extent.repeats
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    repeats = not tensor.is_contiguous() and _repeats(tensor.shape, tensor.stride(), 1)
    return None if tensor.is_cpu else tensor.device, start, start + storage.nbytes(), repeats


def extent_of(tensor: torch.Tensor | Array) -> Extent:
    """The addresses of a tensor or array, which is not empty, and of its allocation."""
    if isinstance(tensor, torch.Tensor):
        address = start = tensor.data_ptr()
        stop = start + span_of(tensor)
        device, area_start, area_stop, repeats = area_of(tensor) or (None, 0, 0, False)
        is_whole = is_dense(tensor)
    else:
        device = None
        address, start, stop = _bounds(tensor)
        owner = tensor
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        _, area_start, area_stop = _bounds(owner) if owner.size else (address, start, stop)
        area_start, area_stop = min(area_start, start), max(area_stop, stop)
        is_whole = tensor.flags.c_contiguous
        repeats = not is_whole and _repeats(tensor.shape, tensor.strides, tensor.itemsize)
    return Extent(
        device=device,
        start=start,
        stop=stop,
        area_start=area_start,
        area_stop=area_stop,
        address=address,
        size_bytes=tensor.nbytes,
        is_whole=is_whole,
        repeats=repeats,
    )


def _repeats(shape: Sequence[int], strides: Sequence[int], unit: int) -> bool:
    """Whether elements of size `unit` may overlap: a stride is smaller than the range that the smaller strides cover."""
    reach = unit
    for step, extent in sorted((abs(step), extent) for step, extent in zip(strides, shape, strict=True) if extent > 1):
        if step < reach:
            return True
        reach += (extent - 1) * step
    return False


def _bounds(array: Array) -> tuple[int, int, int]:
    """The addresses of an array's first element, its lowest byte, and the end of its highest byte."""
    address = start = stop = address_of(array)
    for extent, step in zip(array.shape, array.strides, strict=True):
        if step < 0:
            start += (extent - 1) * step
        else:
            stop += (extent - 1) * step
    return address, start, stop + array.itemsize

"""The order in which the dims of a dense tensor lie in memory: channels_last, transposed, permuted."""

from typing import overload

import numpy as np
import torch

from tensorstore_ck.format.layout import dense_strides
from tensorstore_ck.state.byte_sources import Array, bits_of, new_tensor, strided


def order_of(tensor: torch.Tensor | Array) -> tuple[int, ...]:
    """The dims of a dense tensor or array, outermost first; empty if it is row-major, or has gaps or repeated elements.

    Dims of extent 1 count, too: torch's fused optimizers compare their strides.
    """
    shape = tuple(tensor.shape)
    if isinstance(tensor, torch.Tensor):
        strides = tuple(tensor.stride())
    elif any(step < 0 or step % tensor.itemsize for step in tensor.strides):
        return ()
    else:
        strides = tuple(step // tensor.itemsize for step in tensor.strides)
    if 0 in shape or strides == dense_strides(shape):
        return ()
    order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], -shape[dim])))
    dense = dense_strides(shape, order)
    if strides == dense:
        return order
    several = [dim for dim, extent in enumerate(shape) if extent > 1]  # no order gives a dim of extent 1 an arbitrary stride
    is_dense = all(strides[dim] == dense[dim] for dim in several)
    return order if is_dense and [dim for dim in order if shape[dim] > 1] != several else ()


@overload
def in_order(source: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor: ...
@overload
def in_order(source: Array, order: tuple[int, ...]) -> Array: ...
def in_order(source: torch.Tensor | Array, order: tuple[int, ...]) -> torch.Tensor | Array:
    """A copy of `source` whose dims lie in memory in this order."""
    shape = tuple(source.shape)
    if isinstance(source, torch.Tensor):
        plain = new_tensor(shape, source.dtype, source.device)
        copy = strided(plain, dtype=source.dtype, shape=shape, strides=dense_strides(shape, order), offset_bytes=0)
        bits_of(copy).copy_(bits_of(source))
        return copy
    return np.ascontiguousarray(source.transpose(order)).transpose(np.argsort(order))


def in_order_of(model: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`; if `model`, which has the same shape, is dense, a copy with its strides."""
    order = order_of(model)
    is_same = tensor.stride() == model.stride() or not (order or model.is_contiguous())
    return tensor if is_same else in_order(tensor, order)

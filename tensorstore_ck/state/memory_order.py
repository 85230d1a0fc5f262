"""The order in which the dims of a dense tensor lie in memory: channels_last, transposed, permuted."""

from typing import overload

import numpy as np
import torch

from tensorstore_ck.format.layout import dense_strides
from tensorstore_ck.state.byte_sources import Array, bits_of, new_tensor, strided


def order_of(found: torch.Tensor | Array) -> tuple[int, ...]:
    """The dims of a dense tensor or array, outermost first; empty if it is row-major, or has gaps or repeated elements.

    Dims of extent 1 count, too: torch's fused optimizers compare their strides.
    """
    shape = tuple(found.shape)
    if isinstance(found, torch.Tensor):
        strides = tuple(found.stride())
    elif any(step < 0 or step % found.itemsize for step in found.strides):
        return ()
    else:
        strides = tuple(step // found.itemsize for step in found.strides)
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
def in_order(found: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor: ...
@overload
def in_order(found: Array, order: tuple[int, ...]) -> Array: ...
def in_order(found: torch.Tensor | Array, order: tuple[int, ...]) -> torch.Tensor | Array:
    """A copy of `found` that lies in memory in this order."""
    shape = tuple(found.shape)
    if isinstance(found, torch.Tensor):
        plain = new_tensor(shape, found.dtype, found.device)
        copy = strided(plain, found.dtype, shape, dense_strides(shape, order), 0)
        bits_of(copy).copy_(bits_of(found))
        return copy
    return np.ascontiguousarray(found.transpose(order)).transpose(np.argsort(order))


def in_order_of(model: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """`found`, or a copy of it with the strides of `model`, which has the same shape, if that is dense."""
    order = order_of(model)
    is_same = found.stride() == model.stride() or not (order or model.is_contiguous())
    return found if is_same else in_order(found, order)

"""Checks that a tensor has memory that may be read and written, as only plain strided tensors do. Checks all access by address.

The address of any other tensor may not be that of its elements: a wrapper subclass keeps them in inner tensors.
"""

from typing import Final

import torch

from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.state.unsupported_types import advice_for

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of plain tensors, exactly: a subclass may keep its elements anywhere."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a plain strided tensor whose bytes are its whole value. Its memory may still be missing."""
    return type(tensor) in PLAIN and not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the memory of a plain tensor holds its elements one after another, unchanged."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has the memory of all its elements: a sharded module frees its parameters between uses."""
    if not tensor.numel():
        return True
    return tensor.storage_offset() * tensor.itemsize + span_of(tensor) <= tensor.untyped_storage().nbytes()


def span_of(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of a tensor's first element to the end of its last; the tensor is not empty."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return int(sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize


def require_plain(tensor: torch.Tensor, path: str, what: str) -> None:
    """Checks that the memory of `tensor` holds its elements; `what` describes the tensor in the message (`path` is the value's).

    Raises:
        UnsupportedValueError: it does not.
    """
    if is_plain(tensor) and not tensor.is_meta and has_memory(tensor):
        return
    freed = "its memory was freed", "gather it first (a sharded module frees its parameters between uses)"
    reason, advice = advice_for(tensor) or freed
    raise UnsupportedValueError(
        f"cannot store or fill {path or 'the state'}: {what} has no plain memory: {reason}; {advice}", object_id=path
    )


def require_reachable(tensor: torch.Tensor) -> None:
    """The last check before an address is used: `require_plain` without a path.

    Raises:
        UnsupportedValueError: it is not a plain strided tensor with its memory.
    """
    if not is_plain(tensor) or not has_memory(tensor):
        require_plain(tensor, "a tensor", "it")

"""Checks that a tensor has memory that may be read and written: only plain strided tensors have. All access by address checks here.

The address of any other tensor may not be that of its elements: a wrapper subclass keeps them in inner tensors.
"""

from typing import Final

import torch

from tensorstore_ck.errors import UnsupportedValueError

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of plain tensors, exactly: a subclass may keep its elements anywhere."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a plain strided tensor whose bytes are its whole value. Its memory may still be missing."""
    return type(tensor) in PLAIN and not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has the memory of all its elements: a sharded module frees its parameters between uses."""
    stop = tensor.storage_offset() * tensor.itemsize + span_of(tensor)
    return not tensor.numel() or stop <= tensor.untyped_storage().nbytes()


def span_of(tensor: torch.Tensor) -> int:
    """Bytes from the beginning of a tensor's first element to the end of its last."""
    return int(sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1) * tensor.itemsize


def require_plain(tensor: torch.Tensor, path: str, what: str) -> None:
    """Checks that the memory of `tensor` holds its elements; `what` describes the tensor in the message (`path` is the value's).

    Raises:
        UnsupportedValueError: it does not.
    """
    kind = type(tensor)
    if is_plain(tensor) and not tensor.is_meta:
        if has_memory(tensor):
            return
        found, advice = "a tensor whose memory was freed", "gather it first (a sharded module frees its parameters between uses)"
    elif kind not in PLAIN:
        found = f"a {kind.__module__}.{kind.__qualname__}"
        advice = "convert it to a plain tensor, or store it where tsck knows its class (tsck.register_type)"
    elif tensor.is_meta:
        found, advice = "on the meta device and has no data", "materialize it first (.to_empty(), then load or initialize it)"
    elif tensor.is_quantized:
        found, advice = "a quantized tensor", "use .int_repr() with its scale and zero point, or .dequantize()"
    else:
        found, advice = f"of the layout {tensor.layout}", "convert it to a dense tensor (.to_dense())"
    raise UnsupportedValueError(f"cannot store or fill {path or 'the state'}: {what} is {found}; {advice}", object_id=path)


def require_reachable(tensor: torch.Tensor) -> None:
    """The last check before an address is used: `require_plain` without a path.

    Raises:
        UnsupportedValueError: it is not a plain strided tensor with its memory.
    """
    if not is_plain(tensor) or not has_memory(tensor):
        require_plain(tensor, "a tensor", "what is to be read or written")

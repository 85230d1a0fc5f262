"""Which tensors have memory that may be read and written: plain strided ones. Every door to a tensor's memory asks here.

The address that another one tells is not that of its elements, or of nothing at all: a wrapper subclass keeps them in tensors of its own.
"""

from typing import Final

import torch

from tensorstore_ck.errors import UnsupportedValueError

PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types of plain tensors: exactly these, as a subclass may keep its elements anywhere."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether it is a plain strided tensor, of a dtype whose bytes say all. Its memory may still be missing."""
    return type(tensor) in PLAIN and not tensor.is_nested and tensor.layout is torch.strided and not tensor.is_quantized


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has the memory of all its elements: a sharded module frees that of its parameters between uses."""
    if not tensor.numel():
        return True
    last = tensor.storage_offset() + sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize <= tensor.untyped_storage().nbytes()


def require_plain(tensor: torch.Tensor, path: str, what: str) -> None:
    """Checks that the memory of `tensor`, which is `what` of the thing at `path`, holds its elements.

    Raises:
        UnsupportedValueError: it does not.
    """
    kind = type(tensor)
    if is_plain(tensor) and not tensor.is_meta:
        if has_memory(tensor):
            return
        found, advice = "without its memory: its memory was freed", "gather it first (a sharded module frees its parameters between uses)"
    elif kind not in PLAIN:
        found = f"a {kind.__module__}.{kind.__qualname__}"
        advice = "convert it to a plain tensor, or store it where tsck knows its class (tsck.register_type)"
    elif tensor.is_meta:
        found, advice = "on the meta device, and has no data", "materialize it first (.to_empty(), then load or initialize it)"
    elif tensor.is_quantized:
        found, advice = "a quantized tensor", "use .int_repr() with its scale and zero point, or .dequantize()"
    else:
        found, advice = f"of the layout {tensor.layout}", "convert it to a dense tensor (.to_dense())"
    raise UnsupportedValueError(f"cannot store or fill {path or 'the state'}: {what} is {found}; {advice}", object_id=path)


def require_reachable(tensor: torch.Tensor) -> None:
    """The last door, in front of an address: `require_plain` without a path.

    Raises:
        UnsupportedValueError: it is not a plain strided tensor.
    """
    if not is_plain(tensor) or not has_memory(tensor):
        require_plain(tensor, "a tensor", "what is to be read or written")

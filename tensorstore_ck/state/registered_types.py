"""The Python types that a state may hold besides plain ones: torch's, namedtuples, a user's own.

The registry of `register_type` is process-wide: a name in a store must mean one type in a process.
Reading never imports a module, and calls what stored data names only through this registry.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from enum import Enum
from math import prod
from typing import Any, Final, TypeVar

import numpy as np
import torch

from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format.tree import PARAMETER, REQUIRES_GRAD
from tensorstore_ck.format.values import PLAIN_TYPES, numpy_dtype
from tensorstore_ck.state.byte_sources import new_tensor
from tensorstore_ck.state.standard_types import class_path, dataclass_type, enum_type, standard_class, standard_name
from tensorstore_ck.state.torchao_types import RegisteredType, known_class, known_name, wrapper_type
from tensorstore_ck.state.wrapper_subclasses import is_traceable

DTYPE_NAMES: Final[dict[torch.dtype, str]] = {
    dtype: str(dtype).removeprefix("torch.")
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""Every dtype of this torch that can be stored. Quantized dtypes have scales that are not part of their bytes."""
DTYPES: Final = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_ALL_DTYPES: Final = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}

FACTORIES: Final[dict[str, Callable[[], Any]]] = {
    factory.__name__: factory for factory in (bool, int, float, complex, str, bytes, list, tuple, dict, set, OrderedDict)
}
"""The factories that a defaultdict may have, by name."""

T = TypeVar("T")

_PLAIN_CLASSES: Final = PLAIN_TYPES | {list, tuple, dict, OrderedDict, torch.Tensor, np.ndarray}
_registered_classes: dict[type[Any], RegisteredType] = {}
_registered_names: dict[str, RegisteredType] = {}


@dataclass(slots=True, eq=False, repr=False)
class NamedState:
    """A value of a registered type that was taken apart before. The saving process need not have the type."""

    name: str
    state: object
    """See `register_type`."""


@short_errors
def register_type(
    cls: type[T], name: str, to_state: Callable[[T], object] | None = None, from_state: Callable[[Any], T] | None = None
) -> None:
    """Lets states hold instances of exactly `cls`, in this process.

    Args:
        cls: The type. A dataclass and an enum need only a name, and so does a tensor subclass with ``__tensor_flatten__`` and
            ``__tensor_unflatten__``: its inner tensors and its context (torch's term) are stored.
        name: The type's name in stores. Never change it, or register the old name, too.
        to_state: Turns an instance into a state: dicts, lists, tensors, plain values, other registered types.
        from_state: Turns such a state into an instance. Its argument comes from a store: do not execute it.

    Raises:
        InvalidOptionError: `cls` is stored without that, `name` already stands for another type, or one of the two functions is missing
            and needed.
    """
    if cls in _PLAIN_CLASSES:
        raise InvalidOptionError(f"a {cls.__qualname__} is stored as it is: register a type of your own", object_id="cls")
    if not 0 < len(name) <= 256 or not name.isprintable():
        raise InvalidOptionError(f"a type's name must be 1 to 256 printable characters, not {name!r}", object_id="name")
    known = _registered_names.get(name)
    if known is not None and known.cls is not cls:
        raise InvalidOptionError(f"type name {name!r} already stands for {known.cls.__qualname__}: choose another", object_id=name)
    if to_state is not None and from_state is not None:
        registered = RegisteredType(cls, name, to_state, from_state)
    elif to_state is None and from_state is None and is_traceable(cls):
        registered = wrapper_type(cls, name)
    elif to_state is None and from_state is None and issubclass(cls, Enum):
        registered = enum_type(cls, name)
    elif to_state is None and from_state is None and is_dataclass(cls):
        registered = dataclass_type(cls, name)
    else:
        raise InvalidOptionError(
            f"{cls.__qualname__} is no dataclass, enum or tensor with __tensor_flatten__: pass to_state and from_state",
            object_id="to_state",
        )
    _registered_names[name] = _registered_classes[cls] = registered


def registered_class(cls: type[Any]) -> RegisteredType | None:
    """The registration of exactly `cls`: a user's, that of a torchao class, or how a standard type, a dataclass or an enum is stored."""
    return _registered_classes.get(cls) or known_class(cls) or standard_class(cls)


def registered_name(name: str) -> RegisteredType:
    """The registration of `name`. Raises `UnsupportedValueError` if there is none in this process, or its module is not loaded."""
    registered = _registered_names.get(name) or _registered_path(name) or known_name(name) or standard_name(name)
    if registered is None:
        raise UnsupportedValueError(
            f"the snapshot holds values of the type {name!r}, which is not registered here: call tsck.register_type first", object_id=name
        )
    return registered


def _registered_path(name: str) -> RegisteredType | None:
    """The registration of the class that a stored dataclass or enum had when it was not registered."""
    path = class_path(name)
    if path is None:
        return None
    return next((known for cls, known in _registered_classes.items() if f"{cls.__module__}:{cls.__qualname__}" == path), None)


def namedtuple_name(cls: type[Any]) -> str | None:
    """``module:qualname`` of a namedtuple class; None if that name does not lead to it."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    return name if _find_class(name) is cls else None


def namedtuple_class(name: str, fields: list[str]) -> type[tuple[Any, ...]]:
    """The namedtuple class of that name, if its module is loaded and its fields are these.

    Raises:
        UnsupportedValueError: it is not loaded, or has other fields now.
    """
    cls = _find_class(name)
    module = name.partition(":")[0]
    own_fields = getattr(cls, "_fields", None)
    if cls is None or not issubclass(cls, tuple) or not isinstance(own_fields, tuple):
        raise UnsupportedValueError(f"the snapshot holds the namedtuple {name}: import {module} first; it must define it", object_id=name)
    if list(own_fields) != fields:
        raise UnsupportedValueError(
            f"namedtuple {name} has the fields {list(own_fields)}, the snapshot has {fields}: restore it with the code that made it",
            object_id=name,
        )
    return cls


def _find_class(name: str) -> type[Any] | None:
    """Looks only in the dicts of loaded modules and classes: attribute access could run code."""
    module, _, qualname = name.partition(":")
    owner: object = sys.modules.get(module)
    for part in qualname.split("."):
        owner = vars(owner).get(part) if isinstance(owner, type(sys) | type) else None
    return owner if isinstance(owner, type) else None


def encode_torch(value: object) -> list[Any] | None:
    """The hook of `values.encode` for torch's own small types."""
    if type(value) is torch.dtype:
        return ["dtype", str(value).removeprefix("torch.")]
    if type(value) is torch.device:
        return ["device", str(value)]
    if type(value) is torch.Size:
        return ["size", list(value)]
    return None


def decode_torch(tag: str, rest: list[Any]) -> object:
    """The hook of `values.decode`."""
    if tag == "tensor":
        return _decode_tensor(*rest)
    (item,) = rest
    if tag == "dtype" and type(item) is str:
        if item not in _ALL_DTYPES:
            raise UnsupportedValueError(f"torch {torch.__version__} has no dtype {item!r}: upgrade torch", object_id=item)
        return _ALL_DTYPES[item]
    if tag == "device" and type(item) is str:
        try:
            return torch.device(item)
        except RuntimeError as exc:
            raise ValueError(f"{item!r} is no device") from exc
    if tag == "size" and type(item) is list and all(type(extent) is int for extent in item):
        return torch.Size(item)
    raise KeyError(tag)


def _decode_tensor(dtype: str, shape: list[int], flags: int, data: bytes) -> torch.Tensor | np.ndarray[Any, np.dtype[Any]]:
    """A tensor or array among the values: see `opaque_item`."""
    if (
        type(dtype) is not str
        or type(data) is not bytes
        or flags not in range(4)
        or any(type(extent) is not int or extent < 0 for extent in shape)
    ):
        raise TypeError("a tensor's value is malformed")
    if dtype.startswith("np:"):
        return np.frombuffer(bytearray(data), numpy_dtype(dtype[3:])).reshape(shape)
    kind = torch_dtype(dtype)
    if prod(shape) * kind.itemsize != len(data):
        raise ValueError("a tensor's value has another size than its bytes")
    try:
        tensor = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)
            if data
            else new_tensor(tuple(shape), kind, torch.device("cpu"))
        )
        requires_grad = bool(flags & REQUIRES_GRAD)
        return torch.nn.Parameter(tensor, requires_grad) if flags & PARAMETER else tensor.requires_grad_(requires_grad)
    except RuntimeError as exc:
        raise ValueError(f"no tensor has the shape {shape}") from exc


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a tensor. Raises `UnsupportedValueError` if this torch lacks it."""
    dtype = DTYPES.get(name)
    if dtype is None:
        raise UnsupportedValueError(f"torch {torch.__version__} has no dtype {name!r}: upgrade torch", object_id=name)
    return dtype

"""torchao's classes by their names in stores, and `RegisteredType`.

Classes are only looked up in loaded modules: nothing here imports what stored data names.
"""

import dataclasses
import enum
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.state.wrapper_subclasses import flattened, unflattened

_OPTIM: Final = "torchao.optim.subclass_"
_WEIGHTS: Final = "torchao.quantization.quantize_.workflows."
_COMMON: Final = "torchao.quantization.quantize_.common."

_KNOWN: Final = {
    "torchao.OptimState8bit": f"{_OPTIM}8bit",
    "torchao.OptimState4bit": f"{_OPTIM}4bit",
    "torchao.OptimStateFp8": f"{_OPTIM}fp8",
    "torchao.Int8Tensor": f"{_WEIGHTS}int8.int8_tensor",
    "torchao.Float8Tensor": f"{_WEIGHTS}float8.float8_tensor",
    "torchao.Int4Tensor": f"{_WEIGHTS}int4.int4_tensor",
    "torchao.Int4PlainInt32Tensor": f"{_WEIGHTS}int4.int4_plain_int32_tensor",
    "torchao.Int4PreshuffledTensor": f"{_WEIGHTS}int4.int4_preshuffled_tensor",
    "torchao.Int4TilePackedTo4dTensor": f"{_WEIGHTS}int4.int4_tile_packed_to_4d_tensor",
    "torchao.IntxUnpackedToInt8Tensor": f"{_WEIGHTS}intx.intx_unpacked_to_int8_tensor",
    "torchao.IntxOpaqueTensor": f"{_WEIGHTS}intx.intx_opaque_tensor",
    "torchao.WeightWithDynamicFloat8CastTensor": "torchao.float8.fsdp_utils",
    "torchao.QuantizeTensorToInt8Kwargs": f"{_WEIGHTS}int8.int8_tensor",
    "torchao.QuantizeTensorToFloat8Kwargs": f"{_WEIGHTS}float8.float8_tensor",
    "torchao.IntxUnpackedToInt8TensorActivationQuantization": f"{_WEIGHTS}intx.intx_unpacked_to_int8_tensor",
    "torchao.IntxPackingFormat": f"{_WEIGHTS}intx.intx_packing_format",
    "torchao.KernelPreference": f"{_COMMON}kernel_preference",
    "torchao.MappingType": "torchao.quantization.quant_primitives",
    "torchao.ZeroPointDomain": "torchao.quantization.quant_primitives",
    **{
        f"torchao.{name}": "torchao.quantization.granularity"
        for name in ("PerTensor", "PerAxis", "PerGroup", "PerRow", "PerToken", "PerBlock")
    },
}
"""Name in stores -> the module that has the class."""


class RegisteredType(NamedTuple):
    """How a type is taken apart and rebuilt."""

    cls: type[Any]
    name: str
    to_state: Callable[[Any], object]
    from_state: Callable[[Any], object]
    wraps: bool = False
    """A traceable wrapper subclass of tensors; `wrapper_subclasses` describes its state."""


def wrapper_type(cls: type[Any], name: str) -> RegisteredType:
    """The registration of a traceable wrapper subclass."""
    return RegisteredType(cls, name, flattened, partial(unflattened, cls), wraps=True)


def known_class(cls: Any) -> RegisteredType | None:
    """The registration of a torchao class; None for any other class."""
    name = f"torchao.{cls.__name__}"
    loaded = _loaded(name) if name in _KNOWN else None
    return _registration(loaded, name) if loaded is not None and loaded is cls else None


def known_name(name: str) -> RegisteredType | None:
    """The registration of a torchao class by its name in stores; None for any other name.

    Raises:
        UnsupportedValueError: its module is not loaded.
    """
    if name not in _KNOWN:
        return None
    cls = _loaded(name)
    if cls is None:
        package = "torchao.optim" if _KNOWN[name].startswith(_OPTIM) else "torchao.quantization"
        if name == "torchao.WeightWithDynamicFloat8CastTensor":
            package = "torchao.float8"
        raise UnsupportedValueError(f"the snapshot holds a {name}: import {package} first; it must define it", object_id=name)
    return _registration(cls, name)


def _loaded(name: str) -> type[Any] | None:
    loaded = vars(sys.modules.get(_KNOWN[name], object)).get(name.removeprefix("torchao."))
    return loaded if isinstance(loaded, type) else None


def _registration(cls: type[Any], name: str) -> RegisteredType:
    if issubclass(cls, torch.Tensor):
        return wrapper_type(cls, name)
    if issubclass(cls, enum.Enum):
        return RegisteredType(cls, name, lambda member: member.name, partial(_member, cls))
    return RegisteredType(cls, name, _fields, partial(_of_fields, cls))


def _member(cls: type[enum.Enum], name: object) -> enum.Enum:
    if type(name) is not str or name not in cls.__members__:
        raise UnsupportedValueError(f"{cls.__qualname__} has no member {name!r} here: upgrade torchao", object_id=cls.__qualname__)
    return cls[name]


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _of_fields(cls: type[Any], fields: object) -> Any:
    if not isinstance(fields, dict):
        raise CorruptObjectError(f"a stored {cls.__qualname__} has no fields; run `tsck fsck`", object_id=cls.__qualname__)
    try:
        return cls(**fields)
    except TypeError as exc:
        raise UnsupportedValueError(
            f"{cls.__qualname__} has other fields here than in the snapshot ({exc}): restore it with the torchao that made it",
            object_id=cls.__qualname__,
        ) from exc

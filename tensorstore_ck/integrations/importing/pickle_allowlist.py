"""The names that a checkpoint's pickles may use: `safe_unpickle` creates nothing else.

Tensors are created over existing storages, and only if they fit into them. Containers of known frameworks become plain ones, which
`PickleAllowlist.converted` counts. Everything else stays unknown. No name is ever imported.
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Final

import torch

from tensorstore_ck.format.layout import MAX_DIMS, MAX_TENSOR_BYTES
from tensorstore_ck.integrations.importing.deepspeed.classes import deepspeed_makers
from tensorstore_ck.integrations.importing.key_types import require_cheap_keys
from tensorstore_ck.integrations.importing.malformed import MalformedError
from tensorstore_ck.integrations.importing.numpy_pickles import NUMPY_MAKERS, NumpyArrayClass
from tensorstore_ck.integrations.importing.omegaconf import config_makers
from tensorstore_ck.integrations.importing.placeholders import AllowedGlobal, Unstorable
from tensorstore_ck.state.byte_sources import strided
from tensorstore_ck.state.registered_types import DTYPE_NAMES, DTYPES

_STORAGES: Final = """
    Double:float64 Float:float32 Half:float16 BFloat16:bfloat16 Long:int64 Int:int32 Short:int16 Char:int8 Byte:uint8 Bool:bool
    ComplexDouble:complex128 ComplexFloat:complex64 QUInt8:quint8 QInt8:qint8 QInt32:qint32 QUInt4x2:quint4x2 QUInt2x4:quint2x4"""
"""The beginning of the name of a class of storages, and the name of its dtype in torch."""
_UNSTORABLE: Final = {
    ("torch._utils", "_rebuild_qtensor"): "a quantized tensor",
    ("torch._utils", "_rebuild_sparse_tensor"): "a sparse tensor",
    ("torch._utils", "_rebuild_nested_tensor"): "a nested tensor",
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): "a tensor without data (meta)",
}
"""Functions of torch -> what they make."""
_LAYOUTS: Final = {str(value): value for value in vars(torch).values() if isinstance(value, torch.layout)}
_ATTRIBUTE_DICTS: Final = (
    "lightning.fabric.utilities.data",
    "lightning.pytorch.utilities.parsing",
    "lightning_fabric.utilities.data",
    "pytorch_lightning.utilities.parsing",
)
_PATHS: Final = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path", "PurePath")
_OLD_NAMES: Final = {"long": "int", "unicode": "str"}


@dataclass(slots=True, eq=False, repr=False)
class StorageType:
    """The class of a storage, which gives the dtype of its elements."""

    dtype: torch.dtype


@dataclass(slots=True, eq=False, repr=False)
class Stored:
    """A storage, for tensors."""

    storage: torch.UntypedStorage
    dtype: torch.dtype


class PickleAllowlist:
    """The `FindGlobal` of checkpoints: a table, created for each import to count conversions."""

    def __init__(self, more: dict[tuple[str, str], object] | None = None) -> None:
        """`more`: names in addition to those that all checkpoints may use."""
        self.converted: Counter[str] = Counter()
        """Conversions to other types, in words -> how often."""
        self.parsed_bytes = 0
        """Size of pickles and headers, which limits the size of the state."""
        self.dropped: list[object] = []
        """Attributes of tensors, which are not imported."""
        self._table: dict[tuple[str, str], object] = dict(more or {})
        for name, dtype in DTYPES.items():
            self._table["torch", name] = dtype
        for kind, _, dtype_name in (pair.partition(":") for pair in _STORAGES.split()):
            self._table["torch", f"{kind}Storage"] = StorageType(getattr(torch, dtype_name))
        self._table["numpy", "ndarray"] = NumpyArrayClass()
        self._table["torch.storage", "UntypedStorage"] = StorageType(torch.uint8)
        for (module, name), words in _UNSTORABLE.items():
            self._table[module, name] = AllowedGlobal(name, partial(Unstorable, words))
        for (module, name), make in _MAKERS.items():
            self._table[module, name] = AllowedGlobal(name, make)
        for cls, make in _CLASSES.items():
            self._table[cls.__module__, cls.__name__] = AllowedGlobal(cls.__name__, make, cls)
        self._table["torch._tensor", "_rebuild_from_type_v2"] = AllowedGlobal("_rebuild_from_type_v2", self._from_type)
        self._table["torch._utils", "_rebuild_parameter_with_state"] = AllowedGlobal(
            "_rebuild_parameter_with_state", self._parameter_with_state
        )
        self._table.update(config_makers(self.converted))
        self._table.update(deepspeed_makers(self.converted))
        for module in _ATTRIBUTE_DICTS:
            self._convert(module, "AttributeDict", dict, "a dict")
        self._convert("argparse", "Namespace", dict, "a dict")
        for name in _PATHS:
            for module in ("pathlib", "pathlib._local"):
                self._convert(module, name, _path, "text")

    def allow(self, more: Mapping[tuple[str, str], object]) -> None:
        """Adds names, or replaces what they make."""
        self._table.update(more)

    def __call__(self, module: str, name: str) -> object:
        """The value of a name; see `safe_unpickler.FindGlobal`."""
        if module == "__builtin__":  # in protocol 2
            module, name = "builtins", _OLD_NAMES.get(name, name)
        return self._table[module, name]

    def _convert(self, module: str, name: str, make: Callable[..., object], to: str) -> None:
        def convert(*args: object) -> object:
            made = make(*args)
            self.converted[f"{module.removesuffix('._local')}.{name}, read as {to}"] += 1  # pathlib of Python 3.13
            return made

        self._table[module, name] = AllowedGlobal(name, convert)

    def _from_type(self, maker: object, kind: object, args: tuple[Any, ...], state: object) -> "torch.Tensor | Unstorable":
        """A tensor with attributes. (`safe_unpickle` makes an `UnknownObject` of an unknown subclass.)"""
        if (
            not isinstance(maker, AllowedGlobal)
            or maker.make is None
            or not isinstance(kind, AllowedGlobal)
            or kind.name not in ("Tensor", "Parameter")
        ):
            raise MalformedError("it creates a tensor in an unknown way")
        made = maker.make(*args)
        if not isinstance(made, torch.Tensor | Unstorable):
            raise MalformedError("it creates a tensor from something else")
        self._drop(state)
        return made

    def _parameter_with_state(self, data: Any, requires_grad: Any, hooks: Any, state: object) -> "torch.nn.Parameter | Unstorable":
        self._drop(state)
        return _parameter(data, requires_grad, hooks)

    def _drop(self, attributes: object) -> None:
        if attributes:
            self.converted["attributes of a tensor, left out"] += 1
            self.dropped.append(attributes)


# --- torch ----------------------------------------------------------------------------------------------------------


def _tensor(  # noqa: PLR0917 - as in torch._utils
    stored: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any = False, hooks: Any = None, bits: Any = None
) -> torch.Tensor:
    if not isinstance(stored, Stored):
        raise MalformedError("it creates a tensor without a storage")
    return _finished(_over(stored.storage, dtype=stored.dtype, offset=offset, shape=shape, strides=strides), requires_grad, bits)


def _tensor_v3(  # noqa: PLR0917 - as in torch._utils
    stored: Any, offset: Any, shape: Any, strides: Any, requires_grad: Any, hooks: Any, dtype: Any, bits: Any = None
) -> torch.Tensor:
    if not isinstance(stored, Stored) or not isinstance(dtype, torch.dtype):
        raise MalformedError("it creates a tensor without a storage or dtype")
    return _finished(_over(stored.storage, dtype=dtype, offset=offset, shape=shape, strides=strides), requires_grad, bits)


def _over(storage: torch.UntypedStorage, dtype: torch.dtype, offset: Any, shape: Any, strides: Any) -> torch.Tensor:
    if dtype not in DTYPE_NAMES:
        raise MalformedError(f"it has a tensor of {dtype} without a scale")
    sizes, steps = tuple(shape), tuple(strides)
    if len(sizes) != len(steps) or len(sizes) > MAX_DIMS or any(type(number) is not int for number in (offset, *sizes, *steps)):
        raise MalformedError("it has a tensor whose shape and strides do not fit each other")
    if min((offset, *sizes, *steps)) < 0 or max(steps, default=0) > MAX_TENSOR_BYTES:
        raise MalformedError("it has a tensor with a negative or enormous shape or stride")
    last = offset + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))
    if prod(size or 1 for size in sizes) * dtype.itemsize > MAX_TENSOR_BYTES or (
        0 not in sizes and (last + 1) * dtype.itemsize > storage.nbytes()
    ):
        raise MalformedError(f"it claims a tensor of shape {list(sizes)[:8]}, which does not lie within its {storage.nbytes()} bytes")
    base = torch.empty(0, dtype=torch.uint8).set_(storage)
    return strided(base, dtype=dtype, shape=sizes, strides=steps, offset_bytes=0 if 0 in sizes else offset * dtype.itemsize)


def _finished(tensor: torch.Tensor, requires_grad: Any, bits: Any) -> torch.Tensor:
    if bits:
        if type(bits) is not dict or not set(bits) <= {"conj", "neg"}:
            raise MalformedError("it has a tensor with unknown properties")
        tensor = tensor.conj() if bits.get("conj") else tensor
        tensor = torch._neg_view(tensor) if bits.get("neg") else tensor
    if requires_grad is True:
        tensor.requires_grad_()
    return tensor


def _parameter(data: Any, requires_grad: Any = True, hooks: Any = None) -> "torch.nn.Parameter | Unstorable":
    if isinstance(data, Unstorable):
        return data
    if not isinstance(data, torch.Tensor):
        raise MalformedError("it creates a parameter from something else")
    return torch.nn.Parameter(data.detach(), requires_grad is True)


def _size(items: Any = ()) -> torch.Size:
    if type(items) not in (tuple, list) or any(type(item) is not int for item in items):
        raise MalformedError("it has an invalid size")
    return torch.Size(items)


def _device(kind: Any, index: Any = None) -> torch.device:
    if type(kind) is not str or (index is not None and type(index) is not int):
        raise MalformedError("it has an invalid device")
    return torch.device(kind) if index is None else torch.device(kind, index)


def _layout(name: Any) -> torch.layout:
    if name not in _LAYOUTS:
        raise MalformedError("it has an unknown layout")
    return _LAYOUTS[name]


# --- Python ---------------------------------------------------------------------------------------------------------


def _encoded(text: Any = "", encoding: Any = "latin1") -> bytes:
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise MalformedError("it has bytes in an unknown encoding")
    return text.encode("latin-1")


def _bytearray(data: Any = b"", encoding: Any = None) -> bytearray:
    if encoding is not None:
        data = _encoded(data, encoding)
    if type(data) is not bytes:
        raise MalformedError("it has a bytearray of something else")
    return bytearray(data)


def _set(items: Any = ()) -> set[Any]:
    return set(require_cheap_keys(_items(items)))


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(require_cheap_keys(_items(items)))


def _items(items: Any) -> Any:
    if type(items) not in (list, tuple, set):
        raise MalformedError("it has a set of something else")
    return list(items)


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        raise MalformedError("it has a complex number of something else")
    return complex(real, imaginary)


def _defaultdict(factory: Any = None) -> "defaultdict[Any, Any]":
    if factory is not None and factory not in _CLASSES:
        raise MalformedError("it has a defaultdict with an unknown factory")
    return defaultdict(factory)


def _counter(items: Any = None) -> "Counter[Any]":
    made: Counter[Any] = Counter()
    if items is not None:
        if type(items) is not dict:
            raise MalformedError("it has a Counter of something else")
        made.update(items)
    return made


def _ordered(items: Any = ()) -> "OrderedDict[Any, Any]":
    if type(items) not in (list, tuple):
        raise MalformedError("it has an OrderedDict of something else")
    require_cheap_keys([key for key, _ in items])
    return OrderedDict(items)


def _path(*parts: Any) -> str:
    """str() of the path; its first part is the root, if it has one."""
    if any(type(part) is not str for part in parts):
        raise MalformedError("it has a path of something else")
    first = parts[0] if parts else ""
    return first + "/".join(parts[1:]) if first.endswith(("/", "\\")) else "/".join(parts) or "."


_MAKERS: Final[dict[tuple[str, str], Callable[..., Any] | None]] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch.nn.parameter", "Parameter"): _parameter,
    ("torch", "Tensor"): None,
    ("torch", "Size"): _size,
    ("torch", "device"): _device,
    ("torch.serialization", "_get_layout"): _layout,
    ("_codecs", "encode"): _encoded,
    **NUMPY_MAKERS,
}
_CLASSES: Final[dict[type[Any], Callable[..., Any] | None]] = {
    OrderedDict: _ordered,
    Counter: _counter,
    defaultdict: _defaultdict,
    set: _set,
    frozenset: _frozenset,
    bytearray: _bytearray,
    bytes: _encoded,
    complex: _complex,
    **dict.fromkeys((dict, list, tuple, bool, int, float, str)),
}
"""Classes that may be called (with their function), and others that may only be the factory of a defaultdict."""

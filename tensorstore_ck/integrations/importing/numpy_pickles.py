"""Dtypes, scalars and arrays of numpy in a pickle; those that a snapshot cannot hold become an `Unstorable`."""

import re
from collections.abc import Callable
from math import prod
from typing import Any, Final

import numpy as np

from tensorstore_ck.format.values import numpy_dtype_name
from tensorstore_ck.integrations.importing.malformed import MalformedError
from tensorstore_ck.integrations.importing.placeholders import Deferred, Unstorable

_CORES: Final = ("numpy.core", "numpy._core")


class _NumpyDtype(Unstorable):
    """A dtype under construction: its byte order comes last. By itself it cannot be stored."""

    def __init__(self, name: Any = None, align: Any = False, copy: Any = False) -> None:
        super().__init__("a numpy dtype")
        if type(name) is not str or not re.fullmatch(r"[<>|=]?[a-zA-Z]\d{0,9}", name):
            raise MalformedError("it has an unknown numpy dtype")
        self._dtype = np.dtype(name)

    def build(self, state: Any) -> None:
        """Takes version, byte order, and fields of other dtypes."""
        if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "|", "="):
            raise MalformedError("it has an unknown numpy dtype")
        self.held.append(state)
        if self._dtype.kind in "mM":
            self._dtype = np.dtype(f"{self._dtype.kind}8{_unit_of(state)}")
        self._dtype = self._dtype.newbyteorder(state[1])

    def dtype(self) -> "np.dtype[Any] | None":
        """The dtype, if a store can hold it."""
        return self._dtype if numpy_dtype_name(self._dtype) is not None else None

    def unstorable(self, what: str, *held: object) -> Unstorable:
        """The placeholder for `what` of this dtype, such as "a numpy array"."""
        words = {"O": "objects", "V": "a structured dtype"}.get(self._dtype.kind, f"dtype {self._dtype.str}")
        return Unstorable(f"{what} of {words}", self, *held)


def _unit_of(state: tuple[Any, ...]) -> str:
    """The unit of datetimes, such as ``[25s]``."""
    try:
        unit, count, divisor, _ = state[8][1]
    except (IndexError, TypeError, ValueError):
        raise MalformedError("it has a numpy datetime without a unit") from None
    if type(unit) is not bytes or not re.fullmatch(b"generic|[a-zA-Z]{1,2}", unit) or type(count) is not int or divisor != 1 or count < 1:
        raise MalformedError("it has a numpy datetime of an unknown unit")
    return "" if unit == b"generic" else f"[{count}{unit.decode()}]"


class NumpyArrayClass:
    """`numpy.ndarray` as an argument."""


def _scalar(dtype: Any, data: Any) -> "np.generic | Unstorable":
    real = _dtype_of(dtype)
    if real is None:
        return dtype.unstorable("a numpy scalar", data)  # type: ignore[no-any-return]
    if type(data) is not bytes or len(data) != real.itemsize:
        raise MalformedError("it has a numpy scalar of another size than its dtype")
    scalar: np.generic = np.frombuffer(data, real)[0]
    return scalar


def _empty_array(kind: Any, shape: Any, code: Any) -> "NumpyArray":
    if not isinstance(kind, NumpyArrayClass):
        raise MalformedError("it has an unknown kind of numpy array")
    return NumpyArray()


class NumpyArray(Deferred):
    """A numpy array."""

    def build(self, state: Any) -> None:
        """Takes version, shape, dtype, order and bytes."""
        if type(state) is not tuple or len(state) != 5:
            raise MalformedError("it has an unknown numpy array")
        _, shape, dtype, is_fortran, data = state
        self.held.append(state)
        made = _array(data, dtype, shape, "F" if is_fortran else "C")
        self.value = made if isinstance(made, Unstorable) else made.astype(made.dtype.newbyteorder("="), copy=False)  # like numpy


def _array(data: Any, dtype: Any, shape: Any, order: Any) -> "np.ndarray[Any, Any] | Unstorable":
    real = _dtype_of(dtype)
    if real is None:
        return dtype.unstorable("a numpy array", data)  # type: ignore[no-any-return]
    if type(data) not in (bytes, bytearray) or type(shape) is not tuple or any(type(size) is not int or size < 0 for size in shape):
        raise MalformedError("it has a malformed numpy array")
    if len(shape) > 32 or prod(shape) * real.itemsize != len(data) or order not in ("C", "F"):
        raise MalformedError("it has a numpy array whose shape does not fit its bytes")
    return np.frombuffer(bytearray(data), real).reshape(shape, order=order)


def _dtype_of(dtype: Any) -> np.dtype[Any] | None:
    if not isinstance(dtype, _NumpyDtype):
        raise MalformedError("it has a numpy value without a dtype")
    return dtype.dtype()


NUMPY_MAKERS: Final[dict[tuple[str, str], Callable[..., Any]]] = {
    **{(f"{core}.multiarray", "scalar"): _scalar for core in _CORES},
    **{(f"{core}.multiarray", "_reconstruct"): _empty_array for core in _CORES},
    **{(f"{core}.numeric", "_frombuffer"): _array for core in _CORES},
    ("numpy", "dtype"): _NumpyDtype,
}
"""Names in a pickle -> what they make."""

"""The encoding of leaves that are not tensors, and of dict keys.

Pure and free of torch: msgpack-able objects in and out; torch's own types (`torch.dtype` ...) go through hooks that `state` passes.
Format: FORMAT.md, "Trees and values". None, bool, int of 64 bits, float, str and bytes are themselves; any other value is a tagged list:

    ["i", bytes]              int beyond 64 bits, two's complement, little-endian
    ["j", re, im]             complex
    ["a", bytes]              bytearray
    ["s", bytes]              str with lone surrogates, UTF-8 with surrogates let through
    ["u", items]              tuple, where it is a key or inside a set
    ["e", items] ["z", items] set, frozenset; items in the order of their msgpack
    ["li", b] ["ui", b]       list, tuple of ints, as int64, little-endian; ["lf", b] ["uf", b] of floats
    ["v", dtype, bytes]       numpy scalar
    ["dtype", str] ["device", str] ["size", ints]      torch's; made by the hooks
    ["tensor", dtype, shape, flags, bytes]             a tensor or numpy array in a subtree; dtypes and flags as in layouts
    ["tree", node, values]                             a subtree
    ["b", kind, i]            the value is in blob i: its UTF-8 ("str"), itself ("bytes"), the bytes of tag `kind`, or else msgpack ("m")

Only exact types are encoded: a subclass would be restored as its base. Encoding is canonical: equal bits give equal bytes.
"""

import re
import struct
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.hash_probes import fault_of, reject_slow_keys
from tensorstore_ck.format.layout import INLINE_VALUE_BYTES
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES, pack_body, unpack_body

MAX_NESTING: Final = 60
"""Levels of containers in a state. Each takes two levels of msgpack (`sealed.MAX_DEPTH`)."""

Encode = Callable[[object], list[Any] | None]
"""Encodes a value of a type that this module does not know, or returns None."""
Decode = Callable[[str, list[Any]], object]
"""Decodes a tagged list that this module does not know; raises KeyError for an unknown tag."""

_NATIVE: Final = frozenset({type(None), bool, float, bytes})
PLAIN_TYPES: Final = _NATIVE | {int, str}
"""Types of values that are no containers, and that no module of special types needs to know."""
_PACKED: Final = {"li": ("<i8", list), "ui": ("<i8", tuple), "lf": ("<f8", list), "uf": ("<f8", tuple)}
_NUMPY_DTYPE: Final = re.compile(r"([<>|]([biufc]\d{1,2}|[SU]\d{1,4}|[mM]8(\[\d*[a-zA-Z]{1,2}\])?))(#\d+)?")
_LONG_DOUBLE: Final = f"#{np.finfo(np.longdouble).nmant}"


def encode(value: object, path: str, encode_other: Encode | None = None) -> Any:
    """The msgpack-able form of `value`. Raises `UnsupportedValueError` if `value` has no such form; the message names `path`."""
    return _encode(value, path, encode_other, 0)


def _encode(value: Any, path: str, other: Encode | None, depth: int) -> Any:
    kind = type(value)
    if kind in _NATIVE:
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 63:
            return value
        return ["i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            return ["s", value.encode("utf-8", "surrogatepass")]
        return value
    if depth >= MAX_NESTING:
        raise UnsupportedValueError(f"{path or 'the state'} is nested deeper than {MAX_NESTING} levels: flatten it", object_id=path)
    if kind is tuple:
        return pack_numbers(value) or ["u", [_encode(item, path, other, depth + 1) for item in value]]
    if kind is set or kind is frozenset:
        pairs = sorted(((_encode(item, path, other, depth + 1), item) for item in value), key=lambda pair: pack_body(pair[0]))
        if fault := fault_of([item for _, item in pairs], is_set=True):
            raise UnsupportedValueError(f"cannot store {path or 'the state'}: {fault}; use other elements, such as text", object_id=path)
        return ["e" if kind is set else "z", [encoded for encoded, _ in pairs]]
    if kind is complex:
        return ["j", value.real, value.imag]
    if kind is bytearray:
        return ["a", bytes(value)]
    if kind is np.str_:
        return ["v", "U", value.encode("utf-8", "surrogatepass")]
    if kind is np.bytes_:
        return ["v", "S", bytes(value)]
    if isinstance(value, np.generic):
        dtype = numpy_dtype_name(value.dtype)
        if dtype is not None:
            return ["v", dtype, value.tobytes()]
    encoded = other(value) if other is not None else None
    if encoded is None:
        raise UnsupportedValueError(unsupported_message(value, path), object_id=path)
    return encoded


def unsupported_message(value: object, path: str) -> str:
    """The message for a value that has no encoding."""
    kind = type(value)
    for base in (bool, int, float, str, bytes, dict, list, tuple, set):
        if isinstance(value, base):
            advice = f"convert it with {base.__name__}(...), or register the type with tsck.register_type"
            break
    else:
        advice = "leave it out, convert it to plain values, or register the type with tsck.register_type"
    return f"cannot store {path or 'the state'}: it is a {kind.__module__}.{kind.__qualname__}; {advice}"


def pack_numbers(value: Sequence[object]) -> list[Any] | None:
    """A list or tuple of only ints, or only floats, encoded as one array; None for anything else.

    With one leaf per element a permutation of a million samples would be large, and each new loss in a list would change the layout.
    """
    if not value or type(value[0]) not in (int, float) or len(set(map(type, value))) != 1:
        return None
    tag = "l" if type(value) is list else "u"
    if type(value[0]) is float:
        return [tag + "f", struct.pack(f"<{len(value)}d", *value)]
    try:
        return [tag + "i", struct.pack(f"<{len(value)}q", *value)]
    except struct.error:  # beyond 64 bits
        return None


def move_to_blobs(encoded: Any, path: str, blobs: list[bytes]) -> Any:
    """Returns `encoded`, or for a large value a ``["b", ...]`` whose bytes were appended to `blobs`."""
    blob: tuple[str, bytes] | None = None
    if type(encoded) is str:
        if len(encoded) * 4 > INLINE_VALUE_BYTES:
            blob = "str", encoded.encode()
    elif type(encoded) is bytes:
        blob = "bytes", encoded
    elif type(encoded) is list:
        if len(encoded) == 2 and type(encoded[1]) is bytes:
            blob = encoded[0], encoded[1]
        elif encoded[0] not in ("j", "dtype", "device"):
            blob = "m", pack_body(encoded)
            if len(blob[1]) > MAX_OBJECT_BYTES:
                raise UnsupportedValueError(f"cannot store {path}: it has {len(blob[1])} bytes; use a numpy array", object_id=path)
    if blob is None or len(blob[1]) <= INLINE_VALUE_BYTES:
        return encoded
    blobs.append(blob[1])
    return ["b", blob[0], len(blobs) - 1]


def msgpack_blobs(values: Sequence[Any], name: str) -> frozenset[int]:
    """The numbers of the blobs that hold msgpack, from a part's values.

    Raises:
        CorruptObjectError: two values share a blob; no writer does that, and decoding it twice would cost memory twice.
    """
    large = [value for value in values if type(value) is list and len(value) == 3 and value[0] == "b" and type(value[2]) is int]
    if len({number for _, _, number in large}) != len(large):
        raise CorruptObjectError(f"{name} has several values in one blob; run `tsck fsck`", object_id=name)
    return frozenset(number for _, kind, number in large if kind == "m")


def decode(encoded: Any, *, decode_other: Decode | None = None, blob: Callable[[int], bytes] | None = None, name: str = "a value") -> Any:
    """The value that `encode` encoded; `blob` gives the bytes of a large one. Raises `CorruptObjectError` if `encoded` is malformed."""
    try:
        if type(encoded) is list and encoded and encoded[0] == "b" and blob is not None:
            _, kind, index = encoded
            if type(index) is not int or index < 0:
                raise TypeError("a blob needs a number")
            encoded = _from_blob(kind, blob(index), name)
        return _decode(encoded, decode_other)
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, struct.error) as exc:
        raise CorruptObjectError(
            f"{name} is not a valid value ({type(exc).__name__}: {exc!s:.200}); run `tsck fsck`", object_id=name
        ) from exc


def _from_blob(kind: str, data: bytes, name: str) -> Any:
    if kind == "bytes":
        return data
    if kind == "str":
        return data.decode()
    return unpack_body(memoryview(data), name) if kind == "m" else [kind, data]


def _decode(encoded: Any, other: Decode | None) -> Any:
    kind = type(encoded)
    if kind in PLAIN_TYPES:
        return encoded
    if kind is not list:
        raise TypeError(f"a {kind.__name__} is not in the format")
    tag, *rest = encoded
    if tag in _PACKED:
        dtype, container = _PACKED[tag]
        return container(np.frombuffer(_only(rest, bytes), dtype).tolist())
    if tag == "u":
        return tuple([_decode(item, other) for item in _only(rest, list)])
    if tag in ("e", "z"):
        elements = [_decode(item, other) for item in _only(rest, list)]
        reject_slow_keys(elements, is_set=True)
        items = set(elements)
        if len(items) != len(rest[0]):
            raise ValueError("a set has an element twice")
        return items if tag == "e" else frozenset(items)
    if tag == "i":
        return int.from_bytes(_only(rest, bytes), "little", signed=True)
    if tag == "j":
        real, imaginary = rest
        if type(real) is not float or type(imaginary) is not float:
            raise TypeError("a complex needs floats")
        return complex(real, imaginary)
    if tag == "a":
        return bytearray(_only(rest, bytes))
    if tag == "s":
        return _only(rest, bytes).decode("utf-8", "surrogatepass")
    if tag == "v":
        return _numpy_scalar(*rest)
    if other is None or type(tag) is not str:
        raise ValueError(f"unknown tag {tag!r}")
    return other(tag, rest)


def _numpy_scalar(name: str, data: bytes) -> np.generic:
    if type(data) is not bytes:
        raise TypeError("a scalar needs bytes")
    if name == "U":
        return np.str_(data.decode("utf-8", "surrogatepass"))
    if name == "S":
        return np.bytes_(data)
    dtype = numpy_dtype(name)
    if len(data) != dtype.itemsize or dtype.kind in "SU":
        raise ValueError("a scalar has the wrong size")
    scalar: np.generic = np.frombuffer(data, dtype)[0]
    return scalar


def _only(rest: list[Any], kind: type[Any]) -> Any:
    (item,) = rest
    if type(item) is not kind:
        raise TypeError(f"expected {kind.__name__}, not {type(item).__name__}")
    return item


def numpy_dtype_name(dtype: np.dtype[Any]) -> str | None:
    """The stored name of a numpy dtype; None if the format has none.

    The name of a long double includes its kind, since its bits mean something else on another kind of machine.
    """
    if dtype.kind not in "biufcSUmM" or not _NUMPY_DTYPE.fullmatch(dtype.str):
        return None
    return dtype.str + _LONG_DOUBLE if dtype.itemsize > {"f": 8, "c": 16}.get(dtype.kind, dtype.itemsize) else dtype.str


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The dtype of a stored name.

    Raises:
        ValueError, TypeError: not such a name, or a dtype of another kind of machine.
    """
    match = _NUMPY_DTYPE.fullmatch(name)
    if not match or match[4] not in (None, _LONG_DOUBLE):
        raise ValueError(f"{name!r} is not a numpy dtype of this machine")
    dtype = np.dtype(match[1])
    if numpy_dtype_name(dtype) != name:
        raise ValueError(f"{name!r} is not a numpy dtype's name")
    return dtype


def key_text(encoded: Any) -> str:
    """The text of an encoded dict key in a path."""
    if type(encoded) is str:
        return encoded
    return str(encoded if type(encoded) is int else describe(encoded))


def describe(encoded: Any) -> object:
    """An encoded value for people: None, a bool, an int, a finite float, or text. Never raises, even for malformed input."""
    if encoded is None or type(encoded) in (bool, int, str):
        return encoded
    if type(encoded) is float:
        return encoded if encoded - encoded == 0 else str(encoded)
    if type(encoded) is bytes:
        return _shortened(repr(encoded), len(encoded))
    try:
        shown = _described(*encoded)
        return shown[:320] if isinstance(shown, str) else shown
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError, AttributeError, CorruptObjectError):
        return f"(not a value: {type(encoded).__name__})"


def _described(tag: str, *rest: Any) -> object:
    if tag == "b":
        return f"(large {rest[0]}, blob {rest[1]})" if rest[0] != "m" else f"(large value, blob {rest[1]})"
    if tag in _PACKED:
        dtype, container = _PACKED[tag]
        count = len(rest[0]) // 8
        first = np.frombuffer(rest[0][:64], dtype).tolist()
        return f"{container.__name__} of {count}: {', '.join(map(str, first))}{', ...' if count > 8 else ''}"
    if tag in ("u", "e", "z"):
        start, end = {"u": ("(", ")"), "e": ("{", "}"), "z": ("frozenset({", "})")}[tag]
        return _shortened(start + ", ".join(str(describe(item)) for item in rest[0][:64]) + end, len(rest[0]))
    if tag == "dtype":
        return f"torch.{rest[0]}"
    if tag == "device":
        return str(rest[0])
    if tag == "size":
        return f"torch.Size({rest[0]})"
    if tag == "tensor":
        return f"{rest[0]} {rest[1]}"
    value = decode([tag, *rest])
    if tag == "i":
        return value if len(rest[0]) <= 64 else f"int of {value.bit_length()} bits"
    return _shortened(f"{value}" if tag in ("j", "v") else repr(value), len(rest[-1]) if type(rest[-1]) is bytes else 0)


def _shortened(text: str, size: int) -> str:
    return text if len(text) <= 200 else f"{text[:160]}... ({size})"

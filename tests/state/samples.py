"""States to store: every dtype, random bits, random nesting."""

import copy
import random
import struct
from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from tensorstore_ck.state.byte_sources import bits_of

DTYPES = sorted(
    {dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")},
    key=str,
)
NUMPY_DTYPES = [
    *(order + kind for order in "<>" for kind in ("i2", "i4", "i8", "u2", "u4", "u8", "f2", "f4", "f8", "f16", "c8", "c16", "c32")),
    *("i1", "u1", "?", "<U3", ">U3", "S5", "<M8[ns]", ">M8[25s]", "<m8[D]", "<M8"),
]


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Random bits, whatever they mean."""
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = random.Random(seed).randbytes(count) if dtype != torch.bool else bytes(random.Random(seed).choices([0, 1], k=count))
    flat = torch.frombuffer(bytearray(raw or b"\0" * dtype.itemsize), dtype=torch.uint8).clone()
    return flat.view(dtype)[: torch.Size(shape).numel()].view(shape)


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Pair:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


def address(found: Any) -> int:
    return int(found.data_ptr()) if isinstance(found, torch.Tensor) else int(found.__array_interface__["data"][0])


def zeros_like(state: Any) -> Any:
    """A copy with the same sharing and other contents."""
    made = copy.deepcopy(state)

    def wipe(value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel():
            once = value.detach()[tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())]
            bits_of(once)[...] = 0
        elif isinstance(value, np.ndarray):
            value[...] = np.zeros((), value.dtype)
        elif isinstance(value, dict):
            for item in value.values():
                wipe(item)
        elif isinstance(value, list | tuple):
            for item in value:
                wipe(item)

    wipe(made)
    return made


# --- for hypothesis ---------------------------------------------------------------------------------------------------


def is_set_item(item: object) -> bool:
    """NaT and NaN are equal to nothing, so that comparing sets of them shows nothing."""
    return bool(item == item) and not (isinstance(item, tuple) and not all(map(is_set_item, item)))  # noqa: PLR0124


any_float = st.integers(0, 2**64 - 1).map(lambda number: struct.unpack("<d", struct.pack("<Q", number))[0]) | st.floats()
any_text = st.text(st.characters(exclude_categories=[]))
numpy_scalars = st.one_of(
    st.integers(-128, 127).map(np.int8),
    st.integers(0, 2**64 - 1).map(np.uint64),
    any_float.map(np.float64),
    st.integers(0, 2**16 - 1).map(lambda number: np.frombuffer(struct.pack("<H", number), np.float16)[0]),
    st.booleans().map(np.bool_),
    st.floats().map(np.longdouble),
    st.builds(complex, any_float, any_float).map(np.complex128),
    st.integers(-(2**62), 2**62).map(lambda number: np.datetime64(number, "ns")),
    st.integers(-(2**62), 2**62).map(lambda number: np.timedelta64(number, "s")),
    st.text(max_size=5).map(np.str_),
    st.binary(max_size=5).map(np.bytes_),
)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**70), 2**70),
    any_float,
    any_text,
    st.binary(),
    st.builds(complex, any_float, any_float),
    numpy_scalars,
)
hashables = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.frozensets(inner.filter(is_set_item), max_size=4),
    max_leaves=8,
)


leaves = scalars | st.builds(
    lambda dtype, shape, seed: tensor(dtype, tuple(shape), seed),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 9),
)


def _pairs(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(st.tuples(hashables, inner), max_size=4).map(dict)


states: st.SearchStrategy[Any] = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | _pairs(inner)
        | _pairs(inner).map(OrderedDict)
        | _pairs(inner).map(Counter)
        | _pairs(inner).map(lambda items: defaultdict(int, items))
        | st.builds(Point, inner, inner)
        | st.lists(st.integers(-(2**63), 2**63 - 1), min_size=30, max_size=40)
    ),
    max_leaves=12,
)

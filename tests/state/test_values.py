"""The value encoding: exact, canonical, and safe to decode."""

import json
import math
import random
from collections import OrderedDict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.layout import INLINE_VALUE_BYTES
from tensorstore_ck.format.sealed import pack_body, unpack_body
from tensorstore_ck.format.values import MAX_NESTING, decode, describe, encode, key_text, move_to_blobs, pack_numbers
from tests.state.fake import assert_same
from tests.state.samples import hashables, is_set_item

encodable = hashables | st.binary().map(bytearray) | st.sets(hashables.filter(is_set_item), max_size=4)
msgpackable = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)
tagged = st.builds(
    lambda tag, rest: [tag, *rest],
    st.sampled_from(["i", "j", "a", "s", "u", "e", "z", "li", "ui", "lf", "uf", "v", "dtype", "device", "size", "b"]),
    st.lists(msgpackable, max_size=3),
)


def through(value: object) -> Any:
    encoded = encode(value, "x")
    return decode(unpack_body(memoryview(pack_body(encoded)), "x"))


@given(encodable)
def test_comes_back_exactly(value: object) -> None:
    assert_same(value, through(value))


@given(encodable)
def test_encoding_is_canonical(value: object) -> None:
    assert pack_body(encode(value, "x")) == pack_body(encode(through(value), "x"))


def test_sets_do_not_depend_on_their_order() -> None:
    one, other = set(), set()
    for number in range(0, 1000, 8):
        one.add(number)
        other.add(992 - number)
    assert encode(one, "x") == encode(other, "x")


@pytest.mark.parametrize(
    "value",
    [
        *(2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 2**64, 255 << 60, -1, 0, 2**5000),
        *("", "\x00", "\ud800", "a\udfffb", "é", "😀"),
        *(np.bytes_(b"a\0"), np.str_("a\0")),
    ],
)
def test_integers_of_any_size_and_any_text(value: object) -> None:
    assert_same(value, through(value))
    assert_same({value}, through({value}))


def test_lists_of_numbers_of_one_kind_are_one_value() -> None:
    state = random.Random(0).getstate()[1]
    for value in (state, list(state), [math.nan, -0.0] * 40, (0.5,) * 40, [1.5] * 40):
        array = pack_numbers(value)
        assert array is not None
        assert len(pack_body(array)) < 9 * len(value)
        assert_same(value, decode(array))


@pytest.mark.parametrize("value", [[], [True] * 40, [1, 1.0] * 40, [2**63] * 40])
def test_other_lists_are_not(value: list[object]) -> None:
    assert pack_numbers(value) is None


@pytest.mark.parametrize(
    "value",
    [
        "x" * INLINE_VALUE_BYTES * 2,
        "\ud800" * INLINE_VALUE_BYTES,
        b"x" * (INLINE_VALUE_BYTES + 1),
        bytearray(INLINE_VALUE_BYTES + 1),
        1 << (INLINE_VALUE_BYTES * 9),
        frozenset(map(str, range(30000))),
        np.str_("x" * INLINE_VALUE_BYTES * 2),
        tuple(range(100_000)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_large_values_go_to_blobs(value: object) -> None:
    blobs: list[bytes] = []
    encoded = move_to_blobs(encode(value, "x"), "x", blobs)
    assert encoded[0] == "b"
    assert len(blobs) == 1
    assert len(pack_body(encoded)) < 100
    assert "blob 0" in str(describe(encoded))
    assert_same(value, decode(encoded, blob=blobs.__getitem__))


def test_small_values_stay_inline() -> None:
    blobs: list[bytes] = []
    for value in ("x" * (INLINE_VALUE_BYTES // 4), b"x" * INLINE_VALUE_BYTES, 2**100, {1, 2}, 1j):
        encoded = encode(value, "x")
        assert move_to_blobs(encoded, "x", blobs) is encoded
    assert not blobs


class Colour(IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


class Weird:
    pass


@pytest.mark.parametrize("value", [Colour.RED, Name("x"), Weird(), OrderedDict(), object, len, (1).__add__, range(3), np.void(b"xy")])
def test_refuses_what_would_come_back_as_something_else(value: object) -> None:
    for hidden in (value, (1, value)):
        with pytest.raises(UnsupportedValueError, match=r"model\.x") as caught:
            encode(hidden, "model.x")
        assert caught.value.object_id == "model.x"


def test_refuses_deep_nesting() -> None:
    value: Any = ()
    for _ in range(MAX_NESTING):
        value = (value,)
    with pytest.raises(UnsupportedValueError, match="nested deeper"):
        encode(value, "x")


@given(msgpackable | tagged)
def test_decoding_nonsense_raises_only_our_errors(encoded: object) -> None:
    try:
        value = decode(encoded, blob=lambda _: b"\x93\x01\x02\x03")
    except CorruptObjectError:
        return
    assert isinstance(value, bool | int | float | str | bytes | complex | bytearray | tuple | list | set | frozenset | np.generic | None)


@pytest.mark.parametrize(
    "encoded",
    [
        ["v", "|O", b"12345678"],
        ["v", "|V8", b"12345678"],
        ["v", "<f4", b"123"],
        ["v", "f4", b"1234"],
        ["v", "<f4#63", b"1234"],
        ["v", "<f16", b"1" * 16],
        ["v", "<f16#1", b"1" * 16],
        ["v", "<i4,<i4", b"12345678"],
        ["e", [1, 1]],
        ["e", [["li", b""]]],
        ["li", b"123"],
        ["i", "x"],
        ["j", 1, 2],
        ["s", b"\xff\xff"],
        ["b", "str", 0],
        ["b", "m", 0],
        [],
        ["size", [1]],
        {"a": 1},
    ],
    ids=str,
)
def test_refuses_to_decode(encoded: object) -> None:
    with pytest.raises(CorruptObjectError):
        decode(encoded, blob=lambda _: b"\xc1")


@given(msgpackable | tagged)
def test_describe_never_raises_and_gives_json(encoded: object) -> None:
    json.dumps(describe(encoded), allow_nan=False)
    assert len(str(describe(encoded))) < 400 or isinstance(encoded, str)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (1.5, 1.5),
        (math.nan, "nan"),
        (2**70, 2**70),
        (b"ab", "b'ab'"),
        ((1, "a"), "(1, a)"),
        (1 + 2j, "(1+2j)"),
        (np.float32(1.5), "1.5"),
        (None, None),
    ],
)
def test_describe(value: object, shown: object) -> None:
    assert describe(encode(value, "x")) == shown


def test_describe_torch_values_without_torch() -> None:
    assert [describe(["dtype", "bfloat16"]), describe(["device", "cuda:0"]), describe(["size", [1, 2]])] == [
        "torch.bfloat16",
        "cuda:0",
        "torch.Size([1, 2])",
    ]
    assert describe(pack_numbers(list(range(100)))) == "list of 100: 0, 1, 2, 3, 4, 5, 6, 7, ..."


@given(hashables)
def test_every_key_has_a_text(key: object) -> None:
    assert isinstance(key_text(encode(key, "x")), str)

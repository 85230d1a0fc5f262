"""msgpack as sealed objects hold it: what is accepted, what is refused, and that writers obey the readers' limits."""

import struct

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.ids import block_id, derived_hash, new_ulid, parse_ulid, ulid_text
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format import sealed
from tensorstore_ck.format.sealed import MAX_DEPTH, pack_body, unpack_body

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


def unpack(data: bytes) -> object:
    return unpack_body(memoryview(data), "a body")


@settings(max_examples=150)
@given(VALUES, st.data())
def test_what_is_packed_comes_back_bit_for_bit_if_it_is_whole(value: object, data: st.DataObject) -> None:
    packed = pack_body(value)
    assert pack_body(unpack(packed)) == packed
    for damaged in (packed[: data.draw(st.integers(0, len(packed) - 1))], packed + data.draw(st.binary(min_size=1, max_size=5))):
        with pytest.raises(CorruptObjectError):
            unpack(damaged)


@settings(max_examples=400)
@given(st.binary(max_size=60))
def test_it_accepts_what_msgpack_accepts_but_for_extensions_and_maps(data: bytes) -> None:
    """The walk and the library agree on where each value ends."""
    try:
        expected = msgpack.unpackb(data, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        with pytest.raises(CorruptObjectError):
            unpack(data)
        return
    try:
        assert repr(unpack(data)) == repr(expected)
    except CorruptObjectError as exc:
        assert "msgpack type" in str(exc) or "a map has" in str(exc)  # noqa: PT017 - both outcomes are right


@pytest.mark.parametrize("ext", [b"\xd4\x01a", b"\xd6\xff\0\0\0\0", b"\xc7\x00\x01", b"\xc7\x0c\xff" + bytes(12), b"\xc1"])
def test_extension_types_are_refused(ext: bytes) -> None:
    for data in (ext, b"\x91" + ext, b"\x81\xa1x" + ext):
        with pytest.raises(CorruptObjectError, match="msgpack type"):
            unpack(data)


@pytest.mark.parametrize(
    "keys", [b"\xa1a\x01\xa1a\x02", b"\xa1a\x01\xd9\x01a\x02", b"\x01\x01\x02\x02", b"\xa1a\x01\xc4\x01b\x02", b"\x90\x01\xa1a\x02"]
)
def test_maps_have_each_key_once_and_only_text(keys: bytes) -> None:
    with pytest.raises(CorruptObjectError, match="a map has a repeated key"):
        unpack(b"\x82" + keys)


def test_items_size_and_depth_are_bounded_before_anything_is_decoded_and_writers_keep_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed, "MAX_ITEMS", 1000)
    pack_body([[None] * 499] * 2)
    unpack(b"\x92" + (b"\xdc" + struct.pack(">H", 499) + b"\xc0" * 499) * 2)
    with pytest.raises(UnsupportedValueError, match="claims"):
        pack_body([[None] * 500] * 2)
    with pytest.raises(CorruptObjectError, match="claims"):
        unpack(b"\x92" + (b"\xdc" + struct.pack(">H", 500) + b"\xc0" * 500) * 2)
    monkeypatch.setattr(sealed, "MAX_BODY_BYTES", 1000)
    largest = pack_body(bytes(997))
    unpack(largest)
    with pytest.raises(UnsupportedValueError, match="1001 bytes"):
        pack_body(bytes(998))
    with pytest.raises(CorruptObjectError, match="more than an object"):
        unpack(largest + b"\0")
    monkeypatch.undo()
    unpack(b"\x91" * (MAX_DEPTH - 1) + b"\xc0")
    for deep in (b"\x91" * MAX_DEPTH + b"\xc0", b"\x81\xa0" * MAX_DEPTH + b"\xc0", b"\x91" * 100_000 + b"\xc0"):
        with pytest.raises(CorruptObjectError, match="nested deeper"):
            unpack(deep)


@pytest.mark.parametrize("value", [1 << 64, -(1 << 63) - 1, "\ud800", object(), [{1, 2}], {"a": "\udfff"}])
def test_what_msgpack_cannot_hold_is_refused_when_written(value: object) -> None:
    with pytest.raises(UnsupportedValueError, match="cannot be stored"):
        pack_body(value)


def test_ulids_and_hashes() -> None:
    ulid = new_ulid()
    assert parse_ulid(ulid_text(ulid)) == ulid
    assert ulid_text(bytes(16)) == "0" * 26  # type: ignore[arg-type]
    assert parse_ulid("7" + "Z" * 25) == b"\xff" * 16
    for wrong in ("", "8" + "0" * 25, "0" * 25, "0" * 27, "0" * 25 + "I", "0" * 25 + "\n", "\u0660" * 26, "0" * 25 + "a"):
        assert parse_ulid(wrong) is None
    assert len({block_id(b"x"), *(derived_hash(kind, b"x") for kind in ("part", "root", "stored block", "part object"))}) == 5
    assert derived_hash("part", b"a", b"b") == derived_hash("part", b"ab")

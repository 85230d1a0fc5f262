"""Sums of parts make the sum of the whole."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.integrations.importing.crc_check import combined


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_combined(one: bytes, two: bytes) -> None:
    assert combined(zlib.crc32(one), zlib.crc32(two), len(two)) == zlib.crc32(one + two)


def test_combined_with_many_zeros() -> None:
    assert combined(zlib.crc32(b"abc"), zlib.crc32(bytes(10_000_000)), 10_000_000) == zlib.crc32(b"abc" + bytes(10_000_000))

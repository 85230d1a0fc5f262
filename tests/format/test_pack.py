"""Packs and codecs: footers that lie, blocks that do not decode, and bombs."""

import tracemalloc
from contextlib import suppress
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.ids import derived_hash
from tensorstore_ck.errors import CorruptObjectError, FormatVersionError
from tensorstore_ck.format import pack
from tensorstore_ck.format.codec import Codec, decode
from tensorstore_ck.format.codec.registry import encode_lz4
from tests.format.samples import decode_pack, pack_of

Rows = list[tuple[Any, ...]]


def entries_of(*sizes: tuple[int, int]) -> pack.Entries:
    """Entries at (offset, stored bytes)."""
    entries = np.zeros(len(sizes), pack.ENTRY_DTYPE)
    for number, (offset, stored) in enumerate(sizes):
        entries[number] = (bytes(32), offset, 0, stored, min(stored, pack.MAX_BLOCK_BYTES), 0, 0, 0)
    return entries


def decode_with(entries: pack.Entries, pack_bytes: int, header: bytes | None = None) -> pack.Footer:
    header = pack.PLAIN_HEADER if header is None else header
    footer = pack.encode_footer(header, entries)
    return pack.decode_footer(header, footer, pack_bytes + len(footer), "a pack")


def test_entries_tile_the_pack() -> None:
    decode_with(entries_of((64, 10), (74, 5)), 79)
    shorter_or_longer = [([(64, 10), (74, 5)], 78), ([(64, 10), (74, 5)], 80), ([], 65), ([], 63)]
    gaps_and_overlaps = [([(64, 10), (75, 5)], 80), ([(64, 10), (73, 6)], 79), ([(64, 10), (64, 10)], 84), ([(74, 5), (64, 10)], 79)]
    first = [([(63, 11)], 74), ([(0, 74)], 74), ([(65, 9)], 74)]
    huge = [([(64, 10), ((1 << 64) - 1, 5)], 79), ([(64, 10), (1 << 63, 5)], 79), ([((1 << 63) + 64, 10)], 74)]
    for sizes, pack_bytes in (*shorter_or_longer, *gaps_and_overlaps, *first, *huge):
        with pytest.raises(CorruptObjectError):
            decode_with(entries_of(*sizes), pack_bytes)


def test_a_block_has_a_largest_size_and_bases_belong_to_entries() -> None:
    entries = entries_of((64, 10))
    entries["raw"] = pack.MAX_BLOCK_BYTES
    decode_with(entries, 74)
    entries["raw"] += 1
    with pytest.raises(CorruptObjectError, match="larger than"):
        decode_with(entries, 74)
    assert with_bases([(1, 0, b"b" * 32)]).bases["entry"].tolist() == [1]
    with pytest.raises(CorruptObjectError, match="belongs to no entry"):
        with_bases([(2, 0, b"b" * 32)])


def test_counts_that_no_pack_can_have() -> None:
    counts = [(count, 0) for count in (pack.MAX_ENTRIES + 1, 1 << 32, (1 << 64) - 1, 1 << 58, 2)]
    for count, bases in (*counts, (1, 2), (0, 1), (1, (1 << 64) - 1), (pack.MAX_ENTRIES, pack.MAX_ENTRIES)):
        trailer = pack.TRAILER.pack(count, bases, bytes(32), pack.FOOTER_MAGIC)
        with pytest.raises(CorruptObjectError):
            pack.footer_bytes(trailer, pack.HEADER.size + pack.ENTRY_DTYPE.itemsize + pack.TRAILER.size, "a pack")
        with pytest.raises(CorruptObjectError):
            pack.decode_footer(pack.PLAIN_HEADER, trailer, 1 << 30, "a pack")


def with_bases(rows: Rows) -> pack.Footer:
    header, entries = pack.PLAIN_HEADER, entries_of((64, 5), (69, 5))
    bases = np.array(rows, pack.BASE_DTYPE)
    table = entries.tobytes() + bases.tobytes()
    counts = pack.TRAILER.pack(2, len(rows), bytes(32), pack.FOOTER_MAGIC)[:16]
    footer = table + pack.TRAILER.pack(2, len(rows), derived_hash("pack footer", header, table, counts), pack.FOOTER_MAGIC)
    return pack.decode_footer(header, footer, 74 + len(footer), "a pack")


@pytest.mark.parametrize(
    ("header", "error"),
    [
        (pack.HEADER.pack(b"TSCKPACK", 2, 0, bytes(16), bytes(24)), FormatVersionError),
        (pack.HEADER.pack(b"TSCKPACK", 1, 1, bytes(16), bytes(24)), FormatVersionError),
        (pack.HEADER.pack(b"TSCKPACX", 1, 0, bytes(16), bytes(24)), CorruptObjectError),
        (pack.PLAIN_HEADER[:-1], CorruptObjectError),
        (b"", CorruptObjectError),
    ],
)
def test_headers_of_other_packs(header: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        decode_with(entries_of((64, 10)), 74, header)


def test_a_footer_of_another_pack_does_not_pass() -> None:
    one, other = pack_of([b"a" * 50], compress=False), pack_of([b"b" * 50], compress=False)
    footer = other[-(pack.ENTRY_DTYPE.itemsize + pack.TRAILER.size) :]
    with pytest.raises(CorruptObjectError, match="does not match its hash"):
        decode_pack(one[: -len(footer)] + footer)


@settings(max_examples=50)
@given(st.binary(min_size=1, max_size=3000) | st.integers(1, 5000).map(bytes))
def test_lz4_gives_back_what_it_took(raw: bytes) -> None:
    codec, stored = encode_lz4(raw)
    assert len(stored) <= len(raw)
    assert (codec is Codec.RAW) == (len(stored) == len(raw))
    assert bytes(decode(codec, memoryview(stored), len(raw), "a pack")) == raw
    for wrong in (len(raw) - 1, len(raw) + 1, 0):
        with pytest.raises(CorruptObjectError):
            decode(codec, memoryview(stored), wrong, "a pack")


@settings(max_examples=200)
@given(
    st.sampled_from([Codec.RAW, Codec.LZ4]),
    st.binary(max_size=100),
    st.integers(0, 300) | st.sampled_from([pack.MAX_BLOCK_BYTES, (1 << 32) - 1]),
)
def test_any_stored_bytes_decode_to_the_raw_size_or_not_at_all(codec: int, stored: bytes, raw_bytes: int) -> None:
    with suppress(CorruptObjectError):
        assert len(decode(codec, memoryview(stored), raw_bytes, "a pack")) == raw_bytes


@pytest.mark.parametrize("declared", [1, 1000, (8 << 20) - 1])
def test_a_bomb_stays_within_the_size_that_was_declared(declared: int) -> None:
    bomb = lz4.block.compress(bytes(8 << 20), store_size=False)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptObjectError):
            decode(Codec.LZ4, memoryview(bomb), declared, "a pack")
        assert tracemalloc.get_traced_memory()[1] < declared + (1 << 20)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("codec", [6, 255, 65535])
def test_unknown_codecs_ask_for_a_newer_build(codec: int) -> None:
    with pytest.raises(FormatVersionError, match=f"codec {codec}"):
        decode(codec, memoryview(b"x"), 1, "a pack")

"""The compiled kernel does, bit by bit, what numpy and zstd do."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard

from tensorstore_ck.format.codec import cast, changed_words, compiled, delta
from tensorstore_ck.format.codec.byte_split import split, words_of
from tests.effort import in_turns

pytestmark = pytest.mark.skipif(not compiled.HAS_KERNEL, reason="no compiler was there when this was installed")

LENGTHS = range(4097)
WIDTHS = {1: [[1]], 2: [[1, 1], [2]], 4: [[1, 1, 2], [1, 2, 1], [1, 1, 1, 1], [4]], 8: [[1, 1, 2, 4], [1, 1, 1, 1, 1, 1, 2], [8]]}
WAYS = [(item_bytes, widths, rotated) for item_bytes, ways in WIDTHS.items() for widths in ways for rotated in (True, False)][:-1]
"""An odd number: each way takes its turn with lengths of every remainder that a vector leaves."""
BLOCK = 1 << 17
RAW, HUFFMAN, CONSTANT = 0, 1, 2


def test_no_format_needs_the_python_that_built_the_kernel() -> None:
    """A format with ``#`` in a module that Python 3.13 built is a SystemError in 3.11 and 3.12."""
    sources = [*Path(compiled.__file__).parent.glob("*.c")]
    assert sources
    assert [source.name for source in sources if re.search(r'"[A-Za-z!]*[syzu]#', source.read_text())] == []


def numbers(count: int, item_bytes: int, rng: np.random.Generator) -> memoryview:
    """Zeros of both signs, denormals, infinities, NaNs with any payload and other floats, at an odd address: each of them in its turn."""
    bits = 8 * item_bytes
    special = [0, 1 << (bits - 1), 1, 3, (1 << bits) - 1, 0x7F << (bits - 8), 0xFF80 << 48 >> (64 - bits), 0x7FC1 << 48 >> (64 - bits)]
    words = rng.integers(0, 1 << 63, count, dtype=np.uint64).astype(f"<u{item_bytes}")
    words[::3] = np.array(special, np.uint64).astype(words.dtype)[rng.integers(0, len(special), len(words[::3]))]
    into = at_odd_address(words.nbytes, count)
    into[:] = words.tobytes()
    return into


def at_odd_address(size: int, turn: int) -> memoryview:
    start = 1 + 2 * (turn % 32)
    return memoryview(bytearray(start + size))[start:]


def encoded(words: memoryview, item_bytes: int, widths: list[int], how: int, *, rotated: bool) -> list[bytes]:
    into = bytearray(len(words) + len(widths) * (10 + 3 * (len(words) // item_bytes // BLOCK + 1)))
    places = compiled.kernel.encode_groups(words, into, item_bytes, rotated, bytes(widths), bytes([how] * len(widths)))
    return [bytes(into[start:stop]) for start, stop in places]


def test_words_are_split_and_merged_as_by_numpy() -> None:
    rng = np.random.default_rng(0)
    for length, (item_bytes, widths, rotated) in in_turns(LENGTHS, WAYS):
        raw = numbers(length, item_bytes, rng)
        found = encoded(raw, item_bytes, widths, RAW, rotated=rotated)
        wanted = [group.tobytes() for group in split(words_of(raw, item_bytes), widths, rotated=rotated)]
        assert found == wanted, (length, widths, rotated)
        into = at_odd_address(len(raw), length // 3)
        rows = [(width, RAW, data) for width, data in zip(widths, found, strict=True)]
        assert compiled.kernel.decode_groups(rows, into, item_bytes, rotated) is None
        assert into == raw, (length, widths, rotated)


def test_bytes_are_counted_at_each_place_as_by_numpy() -> None:
    """How often each occurs, how often one repeats, and how often by chance: from the occurrences in each piece; and their sums."""
    rng = np.random.default_rng(0)
    for length, (item_bytes, rotated) in in_turns([*LENGTHS, 9000], [(size, rotated) for size in WIDTHS for rotated in (True, False)][:-1]):
        raw = numbers(length, item_bytes, rng)
        numbered = np.sqrt(np.arange(length + 1, dtype=np.float64))  # not logarithms: any table will do
        wanted = []
        for plane in split(words_of(raw, item_bytes), [1] * item_bytes, rotated=rotated):
            pieces = [plane[at : at + 512] for at in range(0, length, 512)]
            squares = sum(int((np.bincount(piece) ** 2).sum()) for piece in pieces)
            looked_up = numbered[np.bincount(plane, minlength=256)].sum()
            values = plane.astype(np.int64)
            repeats = np.count_nonzero(plane[1:] == plane[:-1])
            wanted.append([pytest.approx(looked_up), repeats, squares, values.sum(), (values**2).sum()])
        places = 1 + length % item_bytes
        found = compiled.kernel.survey_words(raw, numbered.tobytes(), item_bytes, rotated, places)
        assert [*map(list, found)] == wanted[:places], (length, item_bytes, rotated)


def test_masters_are_rounded_as_by_numpy() -> None:
    rng = np.random.default_rng(0)
    for length in [*LENGTHS, 9000]:
        masters = numbers(length, 4, rng)
        into = at_odd_address(2 * length, length // 3)
        compiled.kernel.round_words(masters, into)
        assert into == cast.rounded(words_of(masters, 4), cast.KINDS["bfloat16"]).tobytes(), length
        assert compiled.kernel.are_roundings(masters, into)
        if length:
            into[int(rng.integers(0, len(into)))] ^= 1
            assert not compiled.kernel.are_roundings(masters, into), length


def test_differences_are_sorted_as_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    for length, item_bytes in in_turns(LENGTHS, [4, 2, 4, 8, 1]):
        words, base = (words_of(numbers(length, item_bytes, rng), item_bytes) for _ in range(2))
        found = delta.sorted_differences(words, base)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "HAS_KERNEL", False)
            assert np.array_equal(delta.sorted_differences(words, base), found), (length, item_bytes)
        in_place = base.copy()
        delta.add_sorted(in_place, found, in_place)
        assert np.array_equal(in_place, words), (length, item_bytes)


def test_changed_words_are_found_and_applied_as_by_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the limit, with a base in place and apart; a base of which too much changed is as before."""
    rng = np.random.default_rng(0)
    for length, (item_bytes, is_float) in in_turns(LENGTHS, [(size, is_float) for size in WIDTHS for is_float in (True, False)][:-1]):
        base, raw = (numbers(length, item_bytes, rng) for _ in range(2))
        same = np.repeat(rng.random(length) < rng.random(), item_bytes)
        np.copyto(np.frombuffer(raw, np.uint8), np.frombuffer(base, np.uint8), where=same)
        changed = int(np.count_nonzero(words_of(raw, item_bytes) != words_of(base, item_bytes)))
        limit, found = changed - length % 3 // 2, []
        for has_kernel in (True, False):
            into, applied = at_odd_address(len(base), length // 3), at_odd_address(len(base), length // 5)
            into[:] = applied[:] = base
            with monkeypatch.context() as patch:
                patch.setattr(compiled, "HAS_KERNEL", has_kernel)
                patch.setattr(changed_words, "PIECE_BYTES", 1024)
                changes = changed_words.find_changes(raw, base, item_bytes, is_float=is_float, limit=max(0, limit))
                changed_words.patch_changes(raw, into, item_bytes, is_float=is_float, limit=max(0, limit), visit=lambda _: None)
                assert changed_words.apply_changes(changes.gaps, changes.values, applied, is_float=is_float)
            assert into == (raw if changed <= limit else base), (length, item_bytes, is_float, has_kernel)
            found.append((min(changes.changed, limit + 1), changes.gaps.tolist(), changes.values.tolist(), applied.tobytes()))
        assert found[0] == found[1], (length, item_bytes, is_float)
        assert changed > limit or found[0][3] == raw, (length, item_bytes, is_float)


def test_memory_is_copied_and_compared_between_any_addresses() -> None:
    rng = np.random.default_rng(0)
    for length in LENGTHS:
        source, target = at_odd_address(length, length), memoryview(bytearray(64 + length + 1))[length % 64 :]
        source[:] = rng.bytes(length)
        row = np.array([[np.frombuffer(some, np.uint8).ctypes.data for some in (target, source)] + [length]], np.int64)
        compiled.kernel.copy_memory(row.tobytes())
        assert target[:length] == source, length
        assert not any(target[length:]), length
        if length:
            source[int(rng.integers(0, length))] ^= 1
        differs = bytearray(1)
        compiled.kernel.compare_memory(row.tobytes(), differs)
        assert differs[0] == (length > 0), length


def values(count: int, kind: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Bytes whose code has few or many symbols, of lengths that differ little or a lot, up to what must be shortened."""
    drawn: npt.NDArray[Any] = np.full(count, 7)
    if kind == 0:
        drawn = rng.integers(0, 16, count) == 0
    elif kind == 1:
        drawn = np.clip(rng.normal(size=count) * 3 + 118, 0, 255)
    elif kind == 2:
        drawn = np.clip(rng.normal(size=count) * 40 + 128, 0, 255)
    elif kind == 3:
        drawn = rng.geometric(0.4, count)
    elif kind == 4:  # rare ones in a row: the longest codes side by side
        drawn = np.minimum(rng.geometric(0.5, count), 4)
        rare = drawn[count // 3 :][:128]
        rare[:] = 100 + np.arange(len(rare))
    return drawn.astype(np.uint8)


SIZES = [*LENGTHS, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 511, 2 * BLOCK + 512, 3 * BLOCK + 4096]


def test_frames_are_ones_that_zstd_reads() -> None:
    rng = np.random.default_rng(0)
    for size in SIZES:
        raw, into = at_odd_address(size, size), at_odd_address(size, size // 3)
        raw[:] = values(size, size // 5 % 6, rng).tobytes()
        (frame,) = encoded(raw, 1, [1], HUFFMAN, rotated=False)
        assert zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False) == raw, size
        stored = at_odd_address(len(frame), size // 7)
        stored[:] = frame
        assert compiled.kernel.decode_groups([(1, HUFFMAN, stored)], into, 1, False) == (None if size else 0), size  # 0: zstd reads it
        assert into == raw, size


def test_streams_of_which_one_takes_longer_are_decoded_to_their_ends() -> None:
    """Sorted bytes: a stream has nearly all of a frame's bits, another next to none."""
    rng = np.random.default_rng(0)
    for number, size in enumerate([*range(1500, 1600), *range(BLOCK - 50, BLOCK + 1)]):
        raw = np.sort(values(size, 2, rng))
        raw[size // 4 :][raw[size // 4 :] > 100] = 100
        raw = np.roll(raw, number % 4 * size // 4)
        (frame,) = encoded(memoryview(raw.tobytes()), 1, [1], HUFFMAN, rotated=False)
        into = bytearray(size)
        assert compiled.kernel.decode_groups([(1, HUFFMAN, frame)], into, 1, False) is None
        assert into == raw.tobytes() == zstandard.ZstdDecompressor().decompress(frame), size


def test_frames_of_zstd_are_decoded_as_by_zstd() -> None:
    """Those that the kernel does not take are for zstd; it takes most of numbers."""
    rng, taken = np.random.default_rng(0), 0
    coders = [zstandard.ZstdCompressor(level=level) for level in (1, 9)]
    for size in [*range(1024, 4097, 7), BLOCK, BLOCK + 1, 5 * BLOCK + 4096]:
        raw = values(size, 1 + size % 2, rng).tobytes()
        into = bytearray(size)
        refused = compiled.kernel.decode_groups([(1, HUFFMAN, coders[size % 2].compress(raw))], into, 1, False)
        assert refused == 0 or into == raw, size
        taken += refused is None
    assert taken > 200


def test_damaged_frames_are_refused_or_decoded_as_by_zstd() -> None:
    rng = np.random.default_rng(0)
    outcomes = {"refused": 0, "decoded": 0}
    for number in range(1500):
        size = int(rng.integers(512, 2000))
        (frame,) = encoded(memoryview(values(size, number % 4, rng).tobytes()), 1, [1], HUFFMAN, rotated=False)
        damaged, into = bytearray(frame), bytearray(size)
        for _ in range(int(rng.integers(1, 3))):
            damaged[int(rng.integers(0, min(len(damaged), 60 if number % 2 else len(damaged))))] ^= 1 << int(rng.integers(0, 8))
        if number % 5 == 0:
            del damaged[int(rng.integers(0, len(damaged))) :]
        if compiled.kernel.decode_groups([(1, HUFFMAN, bytes(damaged))], into, 1, False) is None:
            assert zstandard.ZstdDecompressor().decompress(bytes(damaged), max_output_size=size) == into, number
            outcomes["decoded"] += 1
        else:
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 100, outcomes


def one_block_frame(size: int, *, is_single: bool) -> bytes:
    """A frame of one block in four streams: of two symbols, with a bit for each."""
    quarter = (size + 3) // 4
    streams = [bytes([1 << count]) for count in (quarter, quarter, quarter, size - 3 * quarter)]
    body = bytes([128, 0x10]) + b"".join(len(stream).to_bytes(2, "little") for stream in streams[:3]) + b"".join(streams)
    block = (2 | 1 << 2 | size << 4 | len(body) << 14).to_bytes(3, "little") + body + b"\0"
    head = bytes([0x20, size]) if is_single else bytes([0x80, 56]) + size.to_bytes(4, "little")
    return (0xFD2FB528).to_bytes(4, "little") + head + (len(block) << 3 | 2 << 1 | 1).to_bytes(3, "little") + block


@pytest.mark.parametrize(("size", "is_single"), [(size, True) for size in (3, 4, 6, 8, 20)] + [(size, False) for size in (3, 4, 6, 8)])
def test_a_frame_that_zstd_refuses_for_its_sizes_is_refused(size: int, is_single: bool) -> None:
    frame = one_block_frame(size, is_single=is_single)
    try:
        expected: bytes | None = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size)
    except zstandard.ZstdError:
        expected = None
    into = bytearray(size)
    is_decoded = compiled.kernel.decode_groups([(1, HUFFMAN, frame)], into, 1, False) is None
    assert (bytes(into) if is_decoded else None) == expected


def test_a_constant_group_is_merged() -> None:
    words = np.arange(9000, dtype="<u4") % 251 + 0x01020300
    found = encoded(memoryview(words.tobytes()), 4, [1, 1, 2], RAW, rotated=False)
    into = bytearray(words.nbytes)
    groups = [(1, CONSTANT, found[0][:1]), (1, CONSTANT, found[1][:1]), (2, RAW, found[2])]
    assert compiled.kernel.decode_groups(groups, into, 4, False) is None
    assert into == words.tobytes()


def test_what_does_not_fit_is_refused() -> None:
    kernel = compiled.kernel
    for into_bytes, item_bytes, widths in ((7, 2, b"\1\1"), (8, 3, b"\1\1\1"), (8, 2, b"\1"), (8, 2, b"")):
        with pytest.raises(ValueError, match=r"memory|word|groups"):
            kernel.encode_groups(bytes(8), bytearray(into_bytes), item_bytes, False, widths, bytes(len(widths)))
    with pytest.raises(ValueError, match="word"):
        kernel.encode_groups(bytes(8), bytearray(100), 2, False, b"\2", bytes([HUFFMAN]))
    for size in range(8 * 3):  # a block of two words takes three
        with pytest.raises(ValueError, match="a logarithm for each number of words"):
            kernel.survey_words(bytes(8), bytes(size), 4, False, 1)
    groups: list[tuple[int, int, bytes]]
    for groups in ([], [(1, RAW, bytes(3))], [(1, CONSTANT, bytes(2))], [(1, 9, bytes(4))], [(2, RAW, bytes(8))], [(1, RAW, bytes(4))] * 9):
        with pytest.raises(ValueError, match=r"group|word"):
            kernel.decode_groups([*groups], bytearray(4), 1, False)
    with pytest.raises((BufferError, TypeError)):
        kernel.decode_groups([(1, RAW, bytes(4))], bytes(4), 1, False)
    with pytest.raises(ValueError, match="rows"):
        kernel.copy_memory(bytes(23))
    for rows, found in ((23, 1), (24, 2), (48, 1)):
        with pytest.raises(ValueError, match="rows"):
            kernel.compare_memory(bytes(rows), bytearray(found))
    for words, base, into, item_bytes in ((8, 8, 4, 4), (8, 4, 8, 4), (6, 6, 6, 4), (8, 8, 8, 3), (8, 8, 8, 0), (8, 8, 8, 16)):
        with pytest.raises(ValueError, match="of one size"):
            kernel.add_differences(bytes(words), bytes(base), bytearray(into), item_bytes)
    with pytest.raises((BufferError, TypeError)):
        kernel.take_differences(bytes(8), bytes(8), bytes(8), 4)

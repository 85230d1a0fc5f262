"""The grid in global coordinates, and content-defined cuts: what dedup across layouts stands on."""

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tensorstore_ck.chunker import cut_box, cut_interval, cut_opaque
from tensorstore_ck.chunker.content_defined import OPAQUE_AVERAGE_BYTES, OPAQUE_MAX_BYTES, OPAQUE_MIN_BYTES
from tensorstore_ck.format.block_assignment import Region
from tensorstore_ck.format.layout import TensorSpec

MIB = 1 << 20
TARGETS = st.sampled_from([16, 48, 64, 100, 256, 4096])
ITEMS = st.sampled_from([1, 2, 3, 4, 8, 16])
SHAPES = st.lists(st.integers(1, 40), max_size=4).map(tuple).filter(lambda shape: prod(shape) <= 3000)

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""offset, size"""


@st.composite
def boxes(draw: st.DrawFn) -> Box:
    shape = draw(SHAPES)
    offset = tuple(draw(st.integers(0, extent - 1)) for extent in shape)
    return offset, tuple(draw(st.integers(1, extent - start)) for start, extent in zip(offset, shape, strict=True))


def blocks_of(box: Box, item_bytes: int, target: int) -> set[tuple[tuple[int, ...], ...]]:
    """Each block as the global coordinates of its elements: blocks are shared where these sets meet."""
    offset, size = box
    elements = list(product(*(range(start, start + extent) for start, extent in zip(offset, size, strict=True))))
    counts = cut_box(offset, size, item_bytes, target) // item_bytes
    ends = np.cumsum(counts).tolist()
    return {tuple(elements[end - count : end]) for end, count in zip(ends, counts.tolist(), strict=True)}


def by_the_rule(offset: tuple[int, ...], size: tuple[int, ...], item_bytes: int, target: int) -> list[int]:
    """README.md's rule, word by word."""
    if not size:
        return [item_bytes]
    row = item_bytes * prod(size[1:])
    if row > target and len(size) > 1:
        return by_the_rule(offset[1:], size[1:], item_bytes, target) * size[0]
    rows = 1
    while 2 * rows * row <= target:
        rows *= 2
    lengths = [0]
    for index in range(offset[0], offset[0] + size[0]):
        if index % rows == 0 and lengths[-1]:
            lengths.append(0)
        lengths[-1] += row
    return lengths


@settings(max_examples=80)
@given(boxes(), ITEMS, TARGETS)
def test_it_follows_the_rule_and_covers_the_box(box: Box, item_bytes: int, target: int) -> None:
    assume(item_bytes <= target)
    lengths = cut_box(*box, item_bytes, target)
    assert lengths.tolist() == by_the_rule(*box, item_bytes, target)
    assert lengths.sum() == prod(box[1]) * item_bytes
    assert lengths.dtype == np.int64
    assert all(0 < length <= target and length % item_bytes == 0 for length in lengths.tolist())


@settings(max_examples=120)
@given(SHAPES.filter(bool), ITEMS, TARGETS, st.booleans(), st.data())
def test_borders_on_the_grid_share_every_block_and_others_cost_one_block_each(
    shape: tuple[int, ...], item_bytes: int, target: int, is_on_grid: bool, data: st.DataObject
) -> None:
    """A split along dim 0 at multiples of a block's rows gives exactly the blocks of the whole tensor."""
    rows = max(target // (prod(shape[1:]) * item_bytes), 1)
    step = 1 << rows.bit_length() - 1 if is_on_grid else 1
    start = data.draw(st.integers(0, (shape[0] - 1) // step)) * step
    stop = min(data.draw(st.integers(start // step + 1, shape[0] // step + 1)) * step, shape[0])
    zeros = (0,) * len(shape)
    part = blocks_of(((start, *zeros[1:]), (stop - start, *shape[1:])), item_bytes, target)
    assert len(part - blocks_of((zeros, shape), item_bytes, target)) <= (0 if is_on_grid else 2)


@settings(max_examples=80)
@given(st.integers(0, 500), st.integers(0, 500), ITEMS, TARGETS)
def test_intervals_are_cut_at_multiples_of_the_target(start: int, count: int, item_bytes: int, target: int) -> None:
    lengths = cut_interval(start, start + count, item_bytes, target).tolist()
    assert sum(lengths) == count * item_bytes
    step = max(target // item_bytes, 1)
    cuts = {start + sum(lengths[:number]) // item_bytes for number in range(1, len(lengths))}
    assert cuts == {cut for cut in range(start + 1, start + count) if cut % step == 0}


@settings(max_examples=80)
@given(st.lists(st.integers(1, 300), max_size=4).map(tuple), ITEMS, st.integers(16, 1 << 24))
def test_up_to_half_the_target_is_one_block(shape: tuple[int, ...], item_bytes: int, target: int) -> None:
    """The reader's shortcut: it must never differ from the grid."""
    spec = TensorSpec("x", "uint8", item_bytes, shape)
    assume(spec.size_bytes <= target)
    region = Region(0, (0,) * len(shape), shape, False, (0,))
    assert region.block_lengths(spec, target) == cut_box((0,) * len(shape), shape, item_bytes, target).tolist()


def test_blocks_at_the_limits() -> None:
    """Nothing has no blocks, an element is never cut, and beyond half the target the shape decides."""
    sizes: list[tuple[int, ...]] = [(0,), (0, 5), (5, 0), (3, 0, 7), (1 << 40, 0)]
    assert [cut_box((0,) * len(size), size, 4, 64).tolist() for size in sizes] == [[]] * 5
    assert cut_interval(7, 7, 4, 64).tolist() == []
    assert cut_box((0, 0), (2, 3), 100, 16).tolist() == [100] * 6
    assert cut_interval(0, 3, 100, 16).tolist() == [100] * 3
    assert cut_box((0, 0), (2, 17), 1, 50).tolist() == [34]
    assert cut_box((0, 0), (3, 11), 1, 64).tolist() == [33]
    assert cut_box((0, 0), (3, 11), 1, 40).tolist() == [22, 11]


LLAMA_8B = {(128_256, 4096): 2, (4096,): 65, (4096, 4096): 64, (1024, 4096): 64, (14_336, 4096): 64, (4096, 14_336): 32}
LLAMA_405B = {
    (128_256, 16_384): 2,
    (16_384,): 253,
    (16_384, 16_384): 252,
    (1024, 16_384): 252,
    (53_248, 16_384): 252,
    (16_384, 53_248): 126,
}


def dim0_blocks(rows: int, row_bytes: int, ranks: int) -> set[tuple[int, int]]:
    """The blocks (start, length) of all ranks, sharded along dim 0 as torch.chunk does."""
    shard = -(-rows // ranks)
    blocks = set()
    for start in range(0, rows, shard):
        lengths = cut_box((start, 0), (min(shard, rows - start), row_bytes), 1, 4 * MIB)
        ends = start * row_bytes + np.cumsum(lengths)
        blocks |= set(zip((ends - lengths).tolist(), lengths.tolist(), strict=True))
    return blocks


def shared(model: dict[tuple[int, ...], int], item_bytes: int, before: int, after: int) -> float:
    """The share of bytes whose blocks are there already when a model on `before` ranks is saved by `after`."""
    same = total = 0
    for shape, count in model.items():
        row_bytes = prod(shape[1:]) * item_bytes
        both = dim0_blocks(shape[0], row_bytes, before) & dim0_blocks(shape[0], row_bytes, after)
        same += count * sum(length for _, length in both)
        total += count * shape[0] * row_bytes
    return same / total


def test_what_resharding_shares() -> None:
    """fp32 masters; the numbers of README.md."""
    small = [(LLAMA_8B, 8, 16, 0.90), (LLAMA_8B, 8, 64, 0.35), (LLAMA_8B, 64, 8, 0.35)]
    large = [(LLAMA_405B, 8, 64, 0.99), (LLAMA_405B, 512, 1024, 0.49), (LLAMA_405B, 1024, 1016, 0.05)]
    for model, before, after, expected in (*small, *large):
        assert shared(model, 4, before, after) == pytest.approx(expected, abs=0.005), (before, after)


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("size", [0, 1, OPAQUE_AVERAGE_BYTES, OPAQUE_AVERAGE_BYTES + 1, 10 * MIB + 7])
def test_opaque_blocks_cover_the_bytes_within_their_bounds(size: int) -> None:
    for data in (noise(size), bytes(size)):
        lengths = cut_opaque(data)
        assert sum(lengths) == size
        assert all(0 < length <= OPAQUE_MAX_BYTES for length in lengths)
        assert all(length >= OPAQUE_MIN_BYTES for length in lengths[:-1])
        assert cut_opaque(memoryview(data)) == lengths


def test_bytes_that_shift_keep_most_blocks() -> None:
    data = noise(24 * MIB)

    def blocks(value: bytes) -> set[bytes]:
        ends = np.cumsum(cut_opaque(value)).tolist()
        return {value[start:end] for start, end in zip([0, *ends], ends, strict=False)}

    before = blocks(data)
    for at, shift in ((0, b"x"), (10 * MIB, b"y" * 1000), (1, noise(300_000, 1))):
        kept = before & blocks(data[:at] + shift + data[at:])
        assert sum(map(len, kept)) >= len(data) - 3 * OPAQUE_MAX_BYTES

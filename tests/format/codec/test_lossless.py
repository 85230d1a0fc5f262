"""Every codec gives back the bytes that it got, and refuses what it did not make."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.common.threads import Scratch
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import Codec, Elements, Encoded, Encoder, compiled, decode, elements_of
from tensorstore_ck.format.codec.byte_split import Words
from tensorstore_ck.format.codec.delta import encode_all
from tensorstore_ck.format.codec.entropy import EntropyCoder

ELEMENTS = [Elements(size, is_float) for size in (1, 2, 4, 8) for is_float in (False, True)]


@st.composite
def blocks(draw: st.DrawFn, elements: Elements) -> bytes:
    """Noise, constants, runs, normal numbers, special ones: the sizes of one element to some thousand."""
    count, seed = draw(st.integers(1, 3000)), draw(st.integers(0, 1 << 32))
    kind = draw(st.sampled_from(["noise", "constant", "runs", "normal", "special"]))
    rng, size = np.random.default_rng(seed), elements.item_bytes
    if kind == "noise":
        return rng.bytes(count * size)
    if kind == "constant":
        return rng.bytes(size) * count
    if kind == "runs":
        return b"".join(rng.bytes(size) * int(each) for each in rng.integers(1, 50, count // 20 + 1))
    if size == 1 or kind == "special":  # zeros of both signs, denormals, infinities and NaNs with any payload
        words = rng.integers(0, 1 << (8 * size - 1), count, dtype=np.uint64) & np.uint64(draw(st.integers(0, (1 << 64) - 1)))
        return words.astype(f"<u{size}").tobytes()
    return (rng.normal(size=count) * 0.02).astype(f"<f{size}").tobytes()


def stored(encoded: Encoded) -> memoryview:
    return memoryview(b"".join(encoded.pieces))


def again(encoded: Encoded, raw: bytes, bases: Sequence[bytes] = ()) -> bytes:
    """In both ways: into a given buffer, and into a new one."""
    place = memoryview(bytearray(len(raw)))
    views = [memoryview(base) for base in bases]
    found = decode(encoded.codec, stored(encoded), len(raw), "a pack", place, bases=views)
    assert found == decode(encoded.codec, stored(encoded), len(raw), "a pack", bases=views)
    return bytes(found)


@pytest.mark.parametrize("elements", ELEMENTS, ids=str)
@settings(max_examples=12)
@given(data=st.data())
def test_planes(elements: Elements, data: st.DataObject) -> None:
    raw = data.draw(blocks(elements))
    for mode in ("fast", "small"):
        encoded = Encoder(mode).encode_tensor(raw, elements)
        assert again(encoded, raw) == raw
        assert len(stored(encoded)) <= len(raw) + 100


@pytest.mark.parametrize("elements", ELEMENTS, ids=str)
@settings(max_examples=15)
@given(data=st.data())
def test_differences(elements: Elements, data: st.DataObject) -> None:
    """To a block that is near, to one that has little to do with it, and to itself but for some elements."""
    base = data.draw(blocks(elements))
    words = np.frombuffer(base, f"<u{elements.item_bytes}").copy()
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 32)))
    share = data.draw(st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
    changed = rng.random(len(words)) < share
    words[changed] += rng.integers(0, 100, int(changed.sum()), dtype=np.uint64).astype(words.dtype)
    raw = words.tobytes()
    difference = Encoder("small").encode_delta(raw, memoryview(base), elements)
    if difference is not None:
        encoded = difference.encoded
        assert encoded.codec == Codec.DELTA
        assert again(encoded, raw, [base]) == raw
        for has_kernel in {compiled.HAS_KERNEL, False}:
            place = memoryview(bytearray(base))
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(compiled, "HAS_KERNEL", has_kernel)
                assert decode(Codec.DELTA, stored(encoded), len(raw), "a pack", place, bases=[place]) == raw, "in the memory of the base"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@settings(max_examples=30)
@given(cuts=st.integers(1, 3), data=st.data())
def test_roundings(dtype: str, cuts: int, data: st.DataObject) -> None:
    pieces = [data.draw(blocks(Elements(4, is_float=True))) for _ in range(cuts)]
    masters = torch.from_numpy(np.frombuffer(b"".join(pieces), "<f4").copy())
    weights = masters.to(getattr(torch, dtype)).view(torch.int16).numpy().tobytes()
    encoded = Encoder("fast").encode_cast(weights, [memoryview(piece) for piece in pieces], dtype)
    if encoded is None:
        assert bool(torch.isnan(masters).any())
        return
    assert len(stored(encoded)) == 8
    assert again(encoded, weights, pieces) == weights
    other = bytearray(weights)
    other[-1] ^= 1
    assert Encoder("fast").encode_cast(other, [memoryview(piece) for piece in pieces], dtype) is None


def test_the_rounding_of_a_nan_is_one_and_the_same() -> None:
    """Machines differ in that, files must not: it is 7FC0, and weights that have others are no roundings."""
    masters = np.array([0x7F800001, 0xFFFFFFFF, 0x3F800000], "<u4").tobytes()
    for nan, fits in ((0x7FC0, True), (0xFFFF, False), (0x7FFF, False)):
        weights = np.array([nan, nan, 0x3F80], "<u2").tobytes()
        encoded = Encoder("fast").encode_cast(weights, [memoryview(masters)], "bfloat16")
        assert (encoded is not None) == fits
        if encoded is not None:
            assert again(encoded, weights, [masters]) == weights


@settings(max_examples=100)
@given(data=st.data())
def test_damage_is_refused_or_detected(data: st.DataObject) -> None:
    """Whatever stored bytes say, decoding gives so many bytes or a `CorruptObjectError`, and allocates no more than it must."""
    elements = data.draw(st.sampled_from(ELEMENTS))
    base = data.draw(blocks(elements))
    words = np.frombuffer(base, f"<u{elements.item_bytes}").copy()
    words[:: data.draw(st.integers(1, 200))] += 1
    encoder = Encoder("small")
    delta = encoder.encode_delta(words.tobytes(), memoryview(base), elements) if data.draw(st.booleans()) else None
    encoded = delta.encoded if delta is not None else encoder.encode_tensor(base, elements)
    damaged = bytearray(stored(encoded))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, min(len(damaged), 64) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    try:
        found = decode(encoded.codec, memoryview(damaged)[:cut], len(base), "a pack", bases=[memoryview(base)])
    except CorruptObjectError:
        return
    assert len(found) == len(base)


def test_what_codes_well_becomes_small_and_sparse_differences_tiny() -> None:
    rng = np.random.default_rng(0)
    weights = torch.from_numpy((rng.normal(size=1 << 19) * 0.02).astype("<f4"))
    cases = [
        (weights.numpy().tobytes(), Elements(4, is_float=True), 0.85),
        (weights.bfloat16().view(torch.int16).numpy().tobytes(), Elements(2, is_float=True), 0.67),
        (weights.bfloat16().float().numpy().tobytes(), Elements(4, is_float=True), 0.35),
        (bytes(1 << 20), Elements(4, is_float=True), 0.0001),
        (np.arange(1 << 17).astype("<i8").tobytes(), Elements(8, is_float=False), 0.3),
    ]
    for raw, elements, share in cases:
        for mode in ("fast", "small"):
            encoded = Encoder(mode).encode_tensor(raw, elements)
            assert len(stored(encoded)) <= share * len(raw), (elements, mode)
    assert Encoder("small").encode_tensor(rng.bytes(1 << 20), Elements(4, is_float=True)).codec == Codec.RAW
    assert Encoder("raw").encode_tensor(bytes(1 << 20), Elements(4, is_float=True)).codec == Codec.RAW
    rng = np.random.default_rng(0)
    base = (rng.normal(size=1 << 20) * 0.02).astype("<f4")
    before = torch.from_numpy(base).bfloat16().view(torch.int16).numpy().view("<u2")
    after = before.copy()
    chosen = rng.random(len(after)) < 0.005
    after[chosen] += 1
    difference = Encoder("small").encode_delta(after.tobytes(), memoryview(before.tobytes()), Elements(2, is_float=True))
    assert difference is not None
    assert len(stored(difference.encoded)) < 0.01 * after.nbytes


def test_matches_are_searched_for_where_pieces_show_that_they_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search takes ten times as long as the rest. The bytes of the masks repeat in rows, those of the other ones only by chance."""
    searched: list[int] = []
    search = EntropyCoder._encode_with_matches

    def noted(coder: EntropyCoder, group: Words) -> bytes:
        searched.append(group.nbytes)
        return search(coder, group)

    monkeypatch.setattr(EntropyCoder, "_encode_with_matches", noted)
    rng = np.random.default_rng(0)
    masks = np.tile(rng.random(1 << 12) < 0.3, 1 << 8).tobytes()
    encoded = Encoder("small").encode_tensor(masks, Elements(1, is_float=False))
    assert len(stored(encoded)) < 0.01 * len(masks)
    searched.clear()
    chance = (rng.geometric(0.7, 1 << 20) - 1).astype("u1").tobytes()
    Encoder("small").encode_tensor(chance, Elements(1, is_float=False))
    assert searched
    assert sum(searched) <= len(chance) / 16


def test_a_difference_is_not_encoded_where_a_sample_shows_that_it_gains_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """To encode it takes twice as long as to encode the block by itself, which then follows."""
    tried = list[object]()

    def noted(*args: Any, scratch: Scratch) -> Any:
        tried.append(args)
        return encode_all(*args, scratch=scratch)

    monkeypatch.setattr("tensorstore_ck.format.codec.encoder.encode_all", noted)
    rng = np.random.default_rng(0)
    before = (rng.normal(size=1 << 19) * 0.02).astype("<f4")
    for step, tries in ((0.004, 1), (0.006, 0)):
        tried.clear()
        after = before + (rng.normal(size=len(before)) * step).astype("<f4")
        difference = Encoder("small").encode_delta(after.tobytes(), memoryview(before.tobytes()), Elements(4, is_float=True))
        assert (difference is not None, len(tried)) == (bool(tries), tries)


@pytest.mark.parametrize("seed", [13, 22, 37])
def test_a_difference_to_rows_of_different_scales_is_kept(seed: int) -> None:
    """A sample estimates it at 0.96 to 0.97 of the block by itself, and it is a fifth smaller: sorted, each scale has a code of its own."""

    def bfloat16(numbers: Words) -> bytes:
        return (numbers.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()

    rng = np.random.default_rng(seed)
    before = np.repeat(10.0 ** rng.uniform(-6, 0, 1024), 1024) * rng.normal(size=1 << 20)
    after = bfloat16(before + rng.normal(size=1 << 20) * 0.0014)
    alone = Encoder("small").encode_tensor(after, Elements(2, is_float=True))
    difference = Encoder("small").encode_delta(after, memoryview(bfloat16(before)), Elements(2, is_float=True))
    assert difference is not None
    assert len(stored(difference.encoded)) < 0.85 * len(stored(alone))


def test_what_was_encoded_stays_while_other_blocks_are_encoded_in_the_same_memory() -> None:
    rng, scratch = np.random.default_rng(0), Scratch()
    blocks = [(rng.normal(size=1 << 15) * 0.02).astype("<f4") for _ in range(4)]
    pairs = [(block + (rng.normal(size=len(block)) * 1e-4).astype("<f4"), block) for block in blocks]
    pairs.append((rng.integers(0, 1 << 32, 1 << 15, "<u4").view("<f4"), blocks[0]))  # its differences are noise
    encoded = [
        Encoder("small", scratch).encode_delta(after.tobytes(), memoryview(base.tobytes()), Elements(4, is_float=True))
        for after, base in pairs
    ]
    assert encoded.pop() is None
    for difference, (after, base) in zip(encoded, pairs[:-1], strict=True):
        assert difference is not None
        assert again(difference.encoded, after.tobytes(), [base.tobytes()]) == after.tobytes()


def test_patterns_of_few_changes_become_tiny() -> None:
    """Rows that changed as a whole, every hundredth word, and words at random, by few differences."""
    rng = np.random.default_rng(0)
    before = rng.integers(0, 1 << 16, 1 << 19).astype("<u2")
    rows, at_random = np.zeros(len(before), bool), rng.random(len(before)) < 0.005
    rows.reshape(-1, 1024)[::100] = True
    every = np.arange(len(before)) % 100 == 0
    for chosen, bound in ((rows, 1200), (every, 200), (at_random, 4200)):
        after = before + chosen.astype("<u2")
        difference = Encoder("fast").encode_delta(after.tobytes(), memoryview(before.tobytes()), Elements(2, is_float=False))
        assert difference is not None
        assert difference.changes is not None
        assert len(stored(difference.encoded)) < bound
        assert again(difference.encoded, after.tobytes(), [before.tobytes()]) == after.tobytes()


def test_elements() -> None:
    floats = {("bfloat16", 2): 2, ("float8_e4m3fn", 1): 1, ("complex64", 8): 4, ("complex32", 4): 2, ("np:<f4", 4): 4, ("np:<c16", 16): 8}
    others = {("int64", 8): 8, ("bool", 1): 1, ("np:<U7", 28): 1}
    assert {each: elements_of(*each) for each in floats} == {each: Elements(size, is_float=True) for each, size in floats.items()}
    assert {each: elements_of(*each) for each in others} == {each: Elements(size, is_float=False) for each, size in others.items()}

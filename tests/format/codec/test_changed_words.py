"""Words that differ are found and applied, with and without the compiled kernel; their sums show every change of a base."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.format.codec import Elements, changed_words, compiled
from tensorstore_ck.format.codec.changed_words import apply_changes, find_changes, patch_changes
from tests.format.codec.test_lossless import blocks


@pytest.mark.parametrize("is_float", [False, True])
@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
@settings(max_examples=10)
@given(data=st.data())
def test_changed_words_are_found_and_applied_with_and_without_the_kernel(item_bytes: int, is_float: bool, data: st.DataObject) -> None:
    if not compiled.HAS_KERNEL:
        pytest.skip("no compiler was there when this was installed")
    base = data.draw(blocks(Elements(item_bytes, is_float)))
    raw = bytearray(base)
    for _ in range(data.draw(st.integers(0, 20))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    limit, piece_bytes = data.draw(st.integers(0, 30)), data.draw(st.sampled_from([64, 1024, 1 << 19]))

    def patched() -> tuple[int, list[int], list[int], bytes]:
        into, visited = bytearray(base), list[memoryview]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(changed_words, "PIECE_BYTES", piece_bytes)
            changes = patch_changes(memoryview(raw), memoryview(into), item_bytes, is_float=is_float, limit=limit, visit=visited.append)
            before = find_changes(memoryview(base), memoryview(raw), item_bytes, is_float=is_float, limit=0)
        assert b"".join(visited) == raw
        assert (changes.sum, changes.base_sum) == (before.base_sum, before.sum)
        assert into == (raw if changes.changed <= limit else base)
        return min(changes.changed, limit + 1), changes.gaps.tolist(), changes.values.tolist(), bytes(into)

    def found() -> tuple[int, list[int], list[int], bool, bytes]:
        changes = find_changes(memoryview(raw), memoryview(base), item_bytes, is_float=is_float, limit=limit)
        into = bytearray(base)
        fits = apply_changes(changes.gaps, changes.values, memoryview(into), is_float=is_float)
        assert changes.changed > limit or into == raw
        return min(changes.changed, limit + 1), changes.gaps.tolist(), changes.values.tolist(), fits, bytes(into)

    compiled_finds = found()
    assert compiled_finds[3]
    assert patched()[:3] == compiled_finds[:3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "HAS_KERNEL", False)
        assert found() == compiled_finds
        assert patched()[:3] == compiled_finds[:3]


@pytest.mark.parametrize("item_bytes", [1, 2, 4, 8])
def test_a_base_is_restored_where_too_much_changed(item_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every difference has its inverse, that of half the range among them."""
    monkeypatch.setattr(changed_words, "PIECE_BYTES", 64)
    edges = [0, 1, 2, 5, (1 << 8 * item_bytes - 1) - 1, 1 << 8 * item_bytes - 1, (1 << 8 * item_bytes - 1) + 1, (1 << 8 * item_bytes) - 1]
    pairs = [(some, other) for some in edges for other in edges]
    raw, base = (np.array(words, f"<u{item_bytes}").tobytes() for words in zip(*pairs, strict=True))
    for is_float in (False, True):
        into = bytearray(base)
        changes = patch_changes(
            memoryview(raw), memoryview(into), item_bytes, is_float=is_float, limit=len(pairs) - len(edges) - 1, visit=lambda _: None
        )
        assert changes.changed > len(pairs) - len(edges) - 1
        assert into == base


@pytest.mark.parametrize("has_kernel", [False, True])
def test_every_bit_and_the_order_of_words_count_in_the_sum_of_a_base(has_kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "HAS_KERNEL", has_kernel and compiled.HAS_KERNEL)
    raw = bytes(range(1, 151))

    def sum_of(base: bytes) -> bytes:
        return find_changes(memoryview(raw), memoryview(base), 2, is_float=True, limit=75).base_sum

    others = [raw[8:16] + raw[:8] + raw[16:], raw[16:32] + raw[:16] + raw[32:]]
    others += [(int.from_bytes(raw, "little") ^ 1 << bit).to_bytes(150, "little") for bit in range(1200)]
    assert sum_of(raw) not in {sum_of(other) for other in others}
    assert find_changes(memoryview(raw), memoryview(bytes(150)), 2, is_float=True, limit=75).sum == sum_of(raw)
    base, gaps = bytearray(6), np.array([1, 2], "<u4")
    for bad in (np.array([1, 0], "<u4"), np.array([1, 3], "<u4"), np.array([1 << 31, 1 << 31], "<u4")):
        assert not apply_changes(bad, np.array([9, 9], "<u2"), memoryview(base), is_float=False)
    assert base == bytes(6)
    assert apply_changes(gaps, np.array([2, 4], "<u2"), memoryview(base), is_float=False)
    assert base == bytes([1, 0, 0, 0, 2, 0])


def test_the_kernel_refuses_changes_that_do_not_fit() -> None:
    kernel = pytest.importorskip("tensorstore_ck.format.codec._kernel")
    for words, base, gaps, values, item_bytes in ((8, 4, 4, 4, 4), (6, 6, 4, 4, 4), (8, 8, 8, 4, 4), (8, 8, 4, 3, 3), (8, 8, 4, 0, 0)):
        with pytest.raises(ValueError, match="of one size"):
            kernel.compare_words(bytes(words), bytes(base), bytearray(gaps), bytearray(values), item_bytes, True, 64, None)
    fitting = bytes(8), bytearray(8), bytearray(4), bytearray(4), 4, True
    for piece_bytes in (-64, 0, 32, 65):
        with pytest.raises(ValueError, match="whole lines"):
            kernel.compare_words(*fitting, piece_bytes, None)
    with pytest.raises(ZeroDivisionError):
        kernel.compare_words(*fitting, 64, lambda _: 1 / 0)
    with pytest.raises((BufferError, TypeError)):
        kernel.compare_words(bytes(8), bytes(8), *fitting[2:], 64, len)
    for gaps, values, into, item_bytes in ((4, 4, 8, 2), (4, 2, 7, 2), (4, 3, 6, 3)):
        with pytest.raises(ValueError, match="whole words"):
            kernel.apply_changes(bytes(gaps), bytes(values), bytearray(into), item_bytes, True)
    with pytest.raises((BufferError, TypeError)):
        kernel.apply_changes(bytes(4), bytes(2), bytes(8), 2, True)

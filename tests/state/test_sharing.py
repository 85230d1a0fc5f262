"""What shares memory in a state shares it again when it comes back, and is stored once."""

from collections import OrderedDict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.state import restore
from tests.state.fake import assert_same, round_trip, stored
from tests.state.samples import address


def test_one_object_comes_back_as_one_object_wherever_it_hangs() -> None:
    weight, array, other = torch.nn.Parameter(torch.ones(2, 2)), np.ones(3), torch.ones(2)
    back = round_trip({"a": weight, "b": [other, weight, array], "c": (array, other)})
    assert back["a"] is back["b"][1]
    assert back["c"][0] is back["b"][2]
    assert back["c"][1] is back["b"][0]


def test_tied_weights_stay_tied() -> None:
    embedding, head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    state = {"model": OrderedDict(e=embedding.weight.detach(), h=head.weight.detach(), t=head.weight.detach().t())}
    content = stored(state)
    assert [spec.name for spec in content.layout.tensors] == ["model.e"]
    back = restore(content)
    assert_same(state, back)
    back["model"]["e"][1, 2] = 42
    assert back["model"]["h"][1, 2] == back["model"]["t"][2, 1] == 42


def test_views_of_a_flat_buffer_stay_tensors_of_their_own() -> None:
    flat = torch.arange(100.0)
    state = {"a": flat[:30].view(5, 6), "b": flat[40:41].view(()), "c": flat[50:90]}
    content = stored(state)
    assert [spec.name for spec in content.layout.tensors] == ["a", "b", "c"]
    assert content.layout.tree == ["d", ["a", "b", "c"], [0, 1, 2]]
    back = restore(content)
    assert_same(state, back)
    assert address(back["c"]) - address(back["a"]) == 200
    assert len({found.untyped_storage().data_ptr() for found in back.values()}) == 1


def test_a_small_part_of_a_large_buffer_does_not_bring_it_along() -> None:
    large = torch.zeros(1 << 22)
    content = stored({"first": large[:10], "last": large[-10:]})
    assert content.layout.storages[0].size_bytes < 10_000
    assert_same({"first": large[:10], "last": large[-10:]}, restore(content))
    assert stored([large[5:10]]).layout.tensors[0].size_bytes == 20


def test_overlapping_views_share_an_extra_tensor() -> None:
    flat = torch.arange(100.0)
    state = {"left": flat[:60], "right": flat[40:], "rows": [flat.view(10, 10)[2:4]]}
    content = stored(state)
    assert [spec.name for spec in content.layout.tensors] == ["left.__storage__"]
    assert content.layout.tensors[0].size_bytes == 400
    back = restore(content)
    assert_same(state, back)
    back["left"][50] = -1
    assert back["right"][10] == -1


def test_columns_of_one_matrix_come_back_as_columns() -> None:
    matrix = torch.arange(60.0).view(6, 10)
    back = round_trip([matrix[:, :4], matrix[:, 4:]])
    assert_same([matrix[:, :4], matrix[:, 4:]], back)
    assert address(back[1]) - address(back[0]) == 16
    assert back[0].stride() == (10, 1)


def test_views_of_another_dtype() -> None:
    base = torch.arange(16, dtype=torch.float32)
    state = {"bits": base.view(torch.int32)[4:8], "base": base, "bytes": base.view(torch.uint8)[3:5]}
    back = round_trip(state)
    assert_same(state, back)
    back["base"][4] = 0.0
    assert back["bits"][0] == 0
    assert address(back["bytes"]) == address(back["base"]) + 3


def test_odd_offsets_in_a_shared_buffer() -> None:
    """A float may begin at any multiple of its own size, counted from the allocation and not from the first tensor."""
    buffer = torch.arange(64, dtype=torch.uint8)
    state = {"bytes": buffer[2:4], "floats": buffer[4:20].view(torch.float32), "both": buffer[8:36].view(torch.int16)}
    back = round_trip(state)
    assert_same(state, back)
    assert address(back["floats"]) == address(back["bytes"]) + 2


@pytest.mark.parametrize("shape", [(5,), (3, 4), ()])
def test_expanded_tensors_store_their_elements_once(shape: tuple[int, ...]) -> None:
    row = torch.tensor([1.5, 2.5])
    expanded = row.view(2, *(1 for _ in shape)).expand(2, *shape)
    content = stored([expanded])
    assert sum(spec.size_bytes for spec in content.layout.tensors) == 8
    assert_same([expanded], restore(content))


def test_a_huge_expanded_tensor_costs_nothing() -> None:
    back = round_trip(torch.zeros(1).expand(1 << 40))
    assert back.shape == (1 << 40,)


def test_arrays_share_memory_with_arrays_and_with_tensors() -> None:
    array = np.arange(24, dtype="<f4").reshape(4, 6)
    state = {
        "reversed": array[::-1, ::-2],
        "column": array[:, 2],
        "tensor": torch.from_numpy(array)[1:3],
        "array": array,
        "bits": array.view("<i4")[1],
    }
    content = stored(state)
    assert len(content.layout.tensors) == 1
    back = restore(content)
    assert_same(state, back)
    back["array"][1, 2] = -5
    assert back["column"][1] == back["tensor"][0, 2] == -5
    assert back["reversed"].strides == state["reversed"].strides


def test_disjoint_parts_of_one_array() -> None:
    array = np.arange(100, dtype=">i8")
    back = round_trip([array[:10], array[20:30]])
    assert_same([array[:10], array[20:30]], back)
    assert address(back[1]) - address(back[0]) == 160


def test_where_memory_was_allocated_does_not_change_the_layout() -> None:
    first, second = sorted((torch.arange(1024.0), torch.arange(1024.0)), key=torch.Tensor.data_ptr)

    def layout_of(one: torch.Tensor, other: torch.Tensor) -> bytes:
        return stored({"a": one[:30], "b": one[40:90], "c": other[10:30], "d": other[20:40]}).layout.encoded

    assert layout_of(first, second) == layout_of(second, first)


def test_allocations_inside_of_another() -> None:
    """`torch.from_numpy` makes a storage of its own for each part of an array."""
    array = np.arange(100.0)
    state = [array, torch.from_numpy(array[:5]), torch.from_numpy(array[50:60])]
    content = stored(state)
    assert len(content.layout.tensors) == 1
    assert_same(state, restore(content))


def test_empty_tensors_share_nothing() -> None:
    base = torch.arange(10.0)
    state = [base, base[3:3], base[:, None][:, :0], torch.empty(0)]
    assert_same(state, round_trip(state))


@given(st.data())
def test_random_views_of_one_buffer(data: st.DataObject) -> None:
    """Against the truth: after writing to each byte through any of them, all of them still agree."""
    base = torch.arange(48, dtype=torch.uint8)
    views = []
    for _ in range(data.draw(st.integers(1, 5))):
        dtype = data.draw(st.sampled_from([torch.uint8, torch.int16, torch.float32]))
        start = data.draw(st.integers(0, 10)) * 4
        shape = data.draw(st.lists(st.integers(1, 3), max_size=2))
        strides = data.draw(st.lists(st.integers(0, 3), min_size=len(shape), max_size=len(shape)))
        reach = sum((extent - 1) * step for extent, step in zip(shape, strides, strict=True)) + 1
        if start + reach * dtype.itemsize <= 48:
            views.append(base.view(dtype).as_strided(shape, strides, start // dtype.itemsize))
    back = round_trip(views)
    assert_same(views, back)
    for number, view in enumerate(views):
        with torch.no_grad():
            for here, there in ((view, back[number]),):
                index = (0,) * here.dim()
                here[index] = 9
                there[index] = 9
        assert_same(views, back)

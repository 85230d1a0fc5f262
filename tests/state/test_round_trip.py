"""capture and restore: types, order, bits and shared memory of any state come back."""

import random
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tensorstore_ck.state.memory as memory_module
from tensorstore_ck.envelope import pack_body
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.layout import Layout, SharedStorage, TensorSpec
from tensorstore_ck.state import capture, register_type, restore
from tests.state.fake import FakeContent, assert_same, bits, round_trip, stored
from tests.state.test_values import hashables, scalars

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


# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 4), (4, 3, 2, 2)], ids=str)
def test_every_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    whole = tensor(dtype, shape)
    assert_same(whole, round_trip(whole))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_is_not_contiguous(dtype: torch.dtype) -> None:
    base = tensor(dtype, (7, 6, 5))
    for view in (base.transpose(0, 2), base[::2, 1:, ::3], base[:, 2], base[3], base.permute(1, 2, 0)[1:]):
        content = FakeContent(capture({"x": view}), 7)
        assert content.layout.tensors[0].shape == tuple(view.shape)
        back = restore(content)["x"]
        assert_same(view, back)
        assert back.is_contiguous()


def test_there_are_as_many_dtypes_as_torch_2_13_has() -> None:
    assert len(DTYPES) >= 41


def test_sources_read_any_range() -> None:
    base = torch.arange(7 * 6 * 5, dtype=torch.int32).view(7, 6, 5)
    for whole in (base, base.permute(2, 0, 1), base[::2, :, 1:4], base[3, 2, 1]):
        (source,) = capture(whole).sources
        raw = bits(whole)
        for start in range(0, len(raw) + 1, 3):
            for stop in range(start, len(raw) + 1, 5):
                assert bytes(source.read(start, stop)) == raw[start:stop]


def test_contiguous_memory_is_not_copied() -> None:
    whole = torch.zeros(1000)
    (source,) = capture([whole]).sources
    whole[3] = 1.0
    assert bytes(source.read(12, 16)) == struct.pack("<f", 1.0)
    array = np.zeros(1000, ">f8")
    (source,) = capture([array]).sources
    array[3] = 1.0
    assert bytes(source.read(24, 32)) == struct.pack(">d", 1.0)


def test_a_source_keeps_its_memory_alive() -> None:
    captured = capture({"x": torch.full((1000,), 7, dtype=torch.uint8)})
    garbage = [torch.zeros(1000, dtype=torch.uint8) for _ in range(100)]
    assert bytes(captured.sources[0].read(0, 1000)) == b"\7" * 1000
    assert garbage


def test_large_tensors_are_never_copied_whole() -> None:
    view = torch.zeros(3000, 1000).t()
    (source,) = capture([view]).sources
    assert isinstance(source, memory_module.CopySource)
    assert len(source.read(0, 4096)) == 4096


def test_conjugate_and_negative_views_come_back_resolved() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conj": z.conj().clone().conj(), "neg": torch.tensor([1 + 2j]).conj().imag}
    assert state["conj"].is_conj()
    assert state["neg"].is_neg()
    back = round_trip(state)
    assert torch.equal(back["conj"], z)
    assert back["neg"].tolist() == [-2.0]
    assert not back["neg"].is_neg()


def test_gradients_and_parameters_are_kept() -> None:
    leaf = torch.ones(3, requires_grad=True)
    state = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False),
        "leaf": leaf,
        "made": leaf * 2,
        "plain": torch.ones(1),
    }
    back = round_trip(state)
    assert_same(state, back)
    assert back["made"].is_leaf


def test_negative_zero_and_nan_payloads() -> None:
    payload = struct.pack("<II", 0x80000000, 0x7FC12345)
    whole = torch.frombuffer(bytearray(payload), dtype=torch.float32)
    assert bits(round_trip([whole])[0]) == payload


# --- shared memory ----------------------------------------------------------------------------------------------------


def address(found: Any) -> int:
    return int(found.data_ptr()) if isinstance(found, torch.Tensor) else int(found.__array_interface__["data"][0])


def test_one_object_comes_back_as_one_object() -> None:
    weight, array = torch.nn.Parameter(torch.ones(2, 2)), np.ones(3)
    back = round_trip({"a": weight, "b": [weight, array], "c": array})
    assert back["a"] is back["b"][0]
    assert back["c"] is back["b"][1]


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


def test_odd_places_in_a_shared_buffer() -> None:
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


# --- arrays and containers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_numpy_dtype(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    raw = random.Random(1).randbytes(24 * size) if np.dtype(dtype).kind != "U" else np.full(24, "añ").astype(dtype).tobytes()
    flat = np.frombuffer(bytearray(raw), dtype)
    matrix = flat.reshape(4, 6)
    for array in (matrix, flat.reshape(2, 3, 4).transpose(), flat[::-5], flat[3:3], flat[5:6].reshape(()), np.asfortranarray(matrix)):
        assert_same(array, round_trip({"x": array})["x"])


def test_arrays_and_scalars_are_told_apart() -> None:
    state = [np.float32(1), np.array(1, "f4"), 1.0, np.zeros(1, "f4"), np.array("x"), np.str_("x")]
    assert_same(state, round_trip(state))


def test_memory_mapped_files_become_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", dtype="<f4", mode="w+", shape=(3, 4))
    mapped[:] = 7
    back = round_trip([mapped])[0]
    assert type(back) is np.ndarray
    assert np.array_equal(back, mapped)
    assert np.array_equal(round_trip([np.asarray(np.memmap(tmp_path / "x", mode="r"))])[0], mapped.view("u1").reshape(-1))


class Point(NamedTuple):
    x: Any
    y: Any = 0


class Pair:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right


def test_containers() -> None:
    attributes = OrderedDict({"a": 1})
    attributes._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    state: dict[Any, Any] = {
        "empty": [{}, [], (), set(), OrderedDict(), Counter(), "", b""],
        "ordered": attributes,
        "counter": Counter({"b": 2, "a": 5}),
        "default": defaultdict(list, {1: [2]}),
        "plain default": defaultdict(None, {1: 2}),
        "point": Point(torch.ones(1), Point(1, 2)),
        "sets": [{1, "a", (2, 3)}, frozenset({None})],
        "torch": [torch.Size([1, 2]), torch.bfloat16, torch.quint8, torch.device("cuda:1"), torch.device("cpu")],
        "keys": {0: 1, "0": 2, (1, ("x",)): 3, None: 4, 1.5: 5, b"k": 6, torch.float32: 7, frozenset({1}): 8, True: 9},
        "rng": [random.getstate(), torch.get_rng_state(), np.random.default_rng(1).bit_generator.state],
    }
    assert_same(state, round_trip(state))
    assert vars(round_trip(attributes)) == {"_metadata": OrderedDict({"": {"version": 1}})}


def test_keys_that_are_no_unicode() -> None:
    assert_same({"\ud800": 1, "é": torch.ones(1)}, round_trip({"\ud800": 1, "é": torch.ones(1)}))


def test_model_and_optimizer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 3, 5])
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}
    back = round_trip(state)
    assert_same(state, back)
    model.load_state_dict(back["model"])
    optimizer.load_state_dict(back["optimizer"])
    schedule.load_state_dict(back["schedule"])


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


@given(states)
def test_any_state(state: Any) -> None:
    assert_same(state, round_trip(state))


@given(states)
def test_capture_is_deterministic(state: Any) -> None:
    one, other = capture(state), capture(state)
    assert one.layout.encode() == other.layout.encode()
    assert pack_body(list(one.values)) == pack_body(list(other.values))


# --- types ------------------------------------------------------------------------------------------------------------


def test_a_namedtuple_is_found_by_name_only() -> None:
    content = stored([Point(1, 2)])
    (node,) = content.layout.tree[1]
    assert node[:3] == ["n", f"{Point.__module__}:Point", ["x", "y"]]
    for name, fields in (("no.such.module:Point", ["x", "y"]), (f"{Point.__module__}:Pair", ["x", "y"]), ("os:system", ["x", "y"])):
        node[1], node[2] = name, fields
        with pytest.raises(UnsupportedValueError, match="import"):
            restore(content)
    assert not content.reads
    node[1], node[2] = f"{Point.__module__}:Point", ["y", "x"]
    with pytest.raises(UnsupportedValueError, match=r"has the fields \['x', 'y'\]"):
        restore(content)


def test_a_namedtuples_own_constructor_is_not_called() -> None:
    content = stored([Checked(1)])
    Checked.calls = 0
    assert_same([Checked._make([1])], restore(content))
    assert Checked.calls == 0


class Checked(namedtuple("Checked", ["x"])):
    calls = 0

    def __new__(cls, x: int) -> "Checked":
        cls.calls += 1
        return super().__new__(cls, x)


def test_registered_types() -> None:
    register_type(Pair, "tests.Pair", lambda pair: {"left": pair.left, "right": pair.right}, lambda state: Pair(**state))
    content = stored({"x": Pair(torch.arange(3), Pair(1, [2]))})
    assert [spec.name for spec in content.layout.tensors] == ["x.left"]
    back = restore(content)["x"]
    assert type(back) is Pair
    assert back.left.tolist() == [0, 1, 2]
    assert back.right.right == [2]
    content.layout.tree[2][0][1] = "tests.Unknown"
    with pytest.raises(UnsupportedValueError, match=r"'tests\.Unknown', which is not registered.*register_type"):
        restore(content)


def test_a_name_cannot_stand_for_two_types() -> None:
    from tensorstore_ck.errors import InvalidOptionError

    class Other:
        pass

    register_type(Pair, "tests.Pair", lambda pair: {"left": pair.left, "right": pair.right}, lambda state: Pair(**state))
    with pytest.raises(InvalidOptionError, match="already stands for Pair"):
        register_type(Other, "tests.Pair", vars, lambda _: Other())
    with pytest.raises(InvalidOptionError):
        register_type(Other, "", vars, lambda _: Other())


def test_what_to_state_makes_lives_as_long_as_it_must() -> None:
    """Two instances make one temporary tensor each: their ids may be the same if the first is dropped early."""

    class Made:
        def __init__(self, number: int) -> None:
            self.number = number

    register_type(Made, "tests.Made", lambda made: torch.tensor([made.number]), lambda state: Made(int(state)))
    assert [made.number for made in round_trip([Made(number) for number in range(50)])] == list(range(50))


# --- what only damage or another build makes --------------------------------------------------------------------------


def changed(content: FakeContent, **fields: Any) -> FakeContent:
    content.layout = Layout(
        **{"tensors": content.layout.tensors, "tree": content.layout.tree, "storages": content.layout.storages} | fields
    )
    return content


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        (TensorSpec("x", "float128", 16, (1,)), UnsupportedValueError, "no dtype 'float128': upgrade torch"),
        (TensorSpec("x", "quint8", 1, (1,)), UnsupportedValueError, "no dtype 'quint8'"),
        (TensorSpec("x", "float32", 8, (1,)), CorruptObjectError, "claims that float32 takes 8 bytes"),
        (TensorSpec("x", "np:<f4", 8, (1,)), CorruptObjectError, "claims that np:<f4 takes 8 bytes"),
        (TensorSpec("x", "np:|O8", 8, (1,)), CorruptObjectError, "not a numpy dtype"),
        (TensorSpec("x", "np:<f16#7", 16, (1,)), CorruptObjectError, "not a numpy dtype of this machine"),
    ],
)
def test_dtypes_that_are_not_here(spec: TensorSpec, error: type[Exception], message: str) -> None:
    content = changed(stored([torch.ones(1)]), tensors=[spec])
    with pytest.raises(error, match=message):
        restore(content)
    assert not content.reads


@pytest.mark.parametrize(
    "storage", [SharedStorage(1 << 40, (0, 1), (0, 1 << 39)), SharedStorage(64, (0, 1), (0, 18)), SharedStorage(64, (0,), (2,))], ids=str
)
def test_impossible_storages(storage: SharedStorage) -> None:
    content = changed(stored([torch.ones(1), torch.ones(2)]), storages=[storage])
    with pytest.raises(CorruptObjectError):
        restore(content)


@pytest.mark.parametrize(
    "value", [["dtype", "float1"], ["device", "no:such"], ["device", 3], ["size", ["x"]], ["size", [1], [2]], ["nothing", 1]]
)
def test_impossible_torch_values(value: Any) -> None:
    content = stored([None])
    content.values = [value]
    with pytest.raises((CorruptObjectError, UnsupportedValueError)):
        restore(content)

"""capture and restore: types, order and bits of any state come back."""

import random
import struct
import sys
from collections import Counter, OrderedDict, defaultdict, namedtuple
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given

import tensorstore_ck.state.byte_sources as memory_module
from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, UnsupportedValueError
from tensorstore_ck.format.layout import Layout, SharedStorage, TensorSpec
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.state import capture, register_type, restore
from tests.state.fake import FakeContent, assert_same, bits, round_trip, stored
from tests.state.samples import DTYPES, NUMPY_DTYPES, Pair, Point, states, tensor

# --- tensors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    for shape in ((), (0,), (1,), (3, 5), (2, 0, 4), (4, 3, 2, 2)):
        whole = tensor(dtype, shape)
        assert_same(whole, round_trip(whole))
    base = tensor(dtype, (7, 6, 5))
    for view in (base.transpose(0, 2), base[::2, 1:, ::3], base[:, 2], base[3], base.permute(1, 2, 0)[1:]):
        content = FakeContent(capture({"x": view}), 7)
        assert content.layout.tensors[0].shape == tuple(view.shape)
        assert_same(view, restore(content)["x"])


def test_there_are_as_many_dtypes_as_torch_2_13_has() -> None:
    assert len(DTYPES) >= 41


def test_sources_read_any_range() -> None:
    base = torch.arange(5 * 4 * 3, dtype=torch.int32).view(5, 4, 3)
    for whole in (base, base.permute(2, 0, 1), base[::2, :, 1:3], base[3, 2, 1]):
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


# --- arrays and containers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_every_numpy_dtype(dtype: str) -> None:
    size = np.dtype(dtype).itemsize
    raw = random.Random(1).randbytes(24 * size) if np.dtype(dtype).kind != "U" else np.full(24, "añ").astype(dtype).tobytes()
    flat = np.frombuffer(bytearray(raw), dtype)
    matrix = flat.reshape(4, 6)
    for array in (matrix, flat.reshape(2, 3, 4).transpose(), flat[::-5], flat[3:3], flat[5:6].reshape(()), np.asfortranarray(matrix)):
        assert_same(array, round_trip({"x": array})["x"])


def test_arrays_and_scalars_are_distinguished() -> None:
    state = [np.float32(1), np.array(1, "f4"), 1.0, np.zeros(1, "f4"), np.array("x"), np.str_("x")]
    assert_same(state, round_trip(state))


def test_memory_mapped_files_become_arrays(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "x", dtype="<f4", mode="w+", shape=(3, 4))
    mapped[:] = 7
    back = round_trip([mapped])[0]
    assert type(back) is np.ndarray
    assert np.array_equal(back, mapped)
    assert np.array_equal(round_trip([np.asarray(np.memmap(tmp_path / "x", mode="r"))])[0], mapped.view("u1").reshape(-1))


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
        "keys": {0: 1, "0": 2, (1, ("x",)): 3, None: 4, 1.5: 5, b"k": 6, "\ud800": 1, torch.float32: 7, frozenset({1}): 8, True: 9},
        "rng": [random.getstate(), torch.get_rng_state(), np.random.default_rng(1).bit_generator.state],
    }
    assert_same(state, round_trip(state))
    assert vars(round_trip(attributes)) == {"_metadata": OrderedDict({"": {"version": 1}})}


@given(states)
def test_any_state_comes_back_and_capture_is_deterministic(state: Any) -> None:
    one, other = capture(state), capture(state)
    assert one.layout.encoded == other.layout.encoded
    assert pack_body(list(one.values)) == pack_body(list(other.values))
    assert_same(state, restore(FakeContent(one)))


# --- types ------------------------------------------------------------------------------------------------------------


def test_a_namedtuple_is_found_by_name_only() -> None:
    content = stored([Point(torch.ones(1), 2)])
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


def test_no_code_of_a_module_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("lazy_module")
    module.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy_module", module)
    content = stored([Point(1, 2)])
    content.layout.tree[1][0][1] = "lazy_module:Point"
    with pytest.raises(UnsupportedValueError, match="import lazy_module"):
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
    class Other:
        pass

    register_type(Pair, "tests.Pair", lambda pair: {"left": pair.left, "right": pair.right}, lambda state: Pair(**state))
    with pytest.raises(InvalidOptionError, match="already stands for Pair"):
        register_type(Other, "tests.Pair", vars, lambda _: Other())
    with pytest.raises(InvalidOptionError):
        register_type(Other, "", vars, lambda _: Other())


@pytest.mark.parametrize("cls", [int, str, dict, torch.Tensor])
def test_a_type_that_is_stored_as_it_is_is_not_registered(cls: type[object]) -> None:
    with pytest.raises(InvalidOptionError, match=f"a {cls.__name__} is stored as it is"):
        register_type(cls, "tests.Plain", repr, lambda _: cls())


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


def test_plain_types_ask_no_module_of_special_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are nearly all of any state, at a save and at a restore into one."""

    def refuse(*_: object) -> None:
        raise AssertionError("a plain value was taken for a special one")

    state = {"w": torch.ones(3), "n": 1, "s": "x", "b": b"y", "f": 1.5, "none": None, "list": [1, "a", (2, True)]}
    for module in ("capture", "restore_into"):
        for name in ("registered_class", "advice_for", "share_of", "unwrap_shards"):
            monkeypatch.setattr(sys.modules[f"tensorstore_ck.state.{module}"], name, refuse)
    content = FakeContent(capture(state))
    target = {"w": torch.zeros(3), "n": 0, "s": "", "b": b"", "f": 0.0, "none": None, "list": [0, "", (0, False)]}
    assert restore(content, into=target) is target
    assert torch.equal(target["w"], state["w"])  # type: ignore[arg-type]
    assert {**target, "w": 0} == {**state, "w": 0}


def test_a_layout_is_encoded_once() -> None:
    layout = capture({"w": torch.ones(3)}).layout
    assert layout.encoded is layout.encoded

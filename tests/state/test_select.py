"""Restoring parts, elsewhere, and in another dtype; and the lazy mapping."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.errors import CorruptObjectError, InvalidOptionError, MismatchError, NotFoundError
from tensorstore_ck.state import LazySnapshot, register_type, restore
from tests.state.fake import assert_same, bits, stored
from tests.state.samples import Pair

STATE: dict[str, Any] = {
    "model": {"h.0.w": torch.arange(6.0).view(2, 3), "h.0.b": torch.ones(2), "h.1.w": torch.zeros(3, dtype=torch.bfloat16)},
    "optimizer": {"state": {0: {"step": torch.tensor(3), "m": torch.ones(2, dtype=torch.float64)}}, "empty": {}},
    "queue": [torch.arange(2), 5, (torch.arange(3), None)],
    "epoch": 7,
    "array": np.arange(4, dtype=">f4"),
}


def selected(*globs: str) -> Any:
    return restore(stored(STATE), select=list(globs))


def test_dict_entries_vanish_and_elements_become_none() -> None:
    assert_same(selected("model.h.0.*"), {"model": {key: STATE["model"][key] for key in ("h.0.w", "h.0.b")}})
    assert_same(selected("epoch", "queue.2.0"), {"queue": [None, None, (torch.arange(3), None)], "epoch": 7})


def test_a_container_may_be_named() -> None:
    assert_same(selected("model"), {"model": STATE["model"]})
    assert_same(selected("model.h.0"), selected("model.h.0.*"))
    assert_same(selected("optimizer.*"), {"optimizer": STATE["optimizer"]})
    assert_same(selected("*"), STATE)
    assert_same(restore(stored(STATE), select="epoch"), {"epoch": 7})


def test_only_what_is_selected_is_read() -> None:
    content = stored(STATE)
    restore(content, select=["queue.0"])
    assert [content.layout.tensors[number].name for number in content.reads] == ["queue.0"]


def test_registered_types_are_kept_whole() -> None:
    register_type(Pair, "tests.Pair", lambda pair: {"left": pair.left, "right": pair.right}, lambda state: Pair(**state))
    back = restore(stored({"x": Pair(torch.ones(1), 5), "y": 1}), select=["x.left"])
    assert list(back) == ["x"]
    assert back["x"].right == 5


def test_a_glob_that_fits_nothing_is_named() -> None:
    with pytest.raises(MismatchError, match=r"nothing in the snapshot fits 'modle\.\*'; there is array, epoch, model\.\*, optimizer\.\*"):
        selected("model.*", "modle.*")
    with pytest.raises(MismatchError):
        selected("Model.*")


@pytest.mark.parametrize("select", [[], [1], "", len])
def test_bad_globs(select: Any) -> None:
    with pytest.raises((InvalidOptionError, MismatchError)):
        restore(stored(STATE), select=select)


def test_views_come_with_or_without_their_base() -> None:
    base = torch.arange(10.0)
    content = stored({"base": base, "view": base[2:4], "other": base[3:6]})
    assert_same(restore(content, select=["view"]), {"view": base[2:4]})
    back = restore(content, select=["view", "other"])
    back["view"][1] = 100
    assert back["other"][0] == 100


def test_one_part_of_a_storage_does_not_bring_the_others() -> None:
    flat = torch.arange(1000.0)
    content = stored({"a": flat[:10], "b": flat[500:510], "c": flat[990:]})
    assert restore(content, select=["b"])["b"].untyped_storage().nbytes() == 40
    assert restore(content, select=["b", "c"])["b"].untyped_storage().nbytes() <= 500 * 4


# --- dtype ------------------------------------------------------------------------------------------------------------


def test_floating_point_tensors_are_converted() -> None:
    back = restore(stored(STATE), dtype=torch.float16)
    assert back["model"]["h.0.w"].dtype == back["optimizer"]["state"][0]["m"].dtype == torch.float16
    assert back["model"]["h.0.w"].tolist() == STATE["model"]["h.0.w"].tolist()
    assert back["optimizer"]["state"][0]["step"].dtype == torch.int64
    assert_same(back["array"], STATE["array"])


def test_conversion_rounds_as_torch_does() -> None:
    values = torch.randn(5000, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2):
        assert bits(restore(stored([values]), dtype=dtype)[0]) == bits(values.to(dtype))


def test_converted_tensors_keep_sharing() -> None:
    base = torch.arange(10.0)
    state = {"tied": base, "again": base.view(2, 5).t(), "tail": base[6:], "parameter": torch.nn.Parameter(base.clone())}
    back = restore(stored(state), dtype=torch.float64)
    assert_same(
        {name: tensor.detach().double() for name, tensor in state.items()}, {name: tensor.detach() for name, tensor in back.items()}
    )
    assert type(back["parameter"]) is torch.nn.Parameter
    back["tied"][6] = -1
    assert back["tail"][0] == back["again"][1, 1] == -1


def test_views_of_several_dtypes_are_converted_apart() -> None:
    base = torch.arange(10.0)
    state = {"floats": base[:6], "more": base[4:], "bits": base.view(torch.int32)[3:5], "wide": torch.ones(1).expand(1 << 40)}
    back = restore(stored(state), dtype=torch.bfloat16)
    assert back["floats"].tolist() == base[:6].tolist()
    assert back["more"].dtype == torch.bfloat16
    assert_same(back["bits"], state["bits"])
    assert back["wide"].dtype == torch.bfloat16
    assert back["wide"].untyped_storage().nbytes() < 100


def test_scales_are_no_numbers() -> None:
    scales = torch.zeros(4, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert_same([scales], restore(stored([scales]), dtype=torch.float32))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32", torch.float4_e2m1fn_x2])
def test_bad_dtypes(dtype: Any) -> None:
    with pytest.raises(InvalidOptionError, match=r"dtype must be a floating-point torch\.dtype"):
        restore(stored(STATE), dtype=dtype)


@pytest.mark.parametrize("device", ["meta", "nonsense", "cuda:77", 3.5])
def test_bad_devices(device: Any) -> None:
    with pytest.raises(InvalidOptionError, match="device"):
        restore(stored(STATE), device=device)


@pytest.mark.parametrize("rename", [{"model": "net"}, {"model.": "net."}, lambda name: {"model": "net"}[name[:5]] + name[5:]])
def test_a_renamed_name_that_is_selected_and_missing_is_an_error(rename: Any) -> None:
    state = {"model": {"a": torch.ones(2)}, "optimizer": {"m": torch.ones(3)}}
    into: dict[str, Any] = {"net": {"a": torch.zeros(2)}, "optimizer": {"m": torch.zeros(3)}}
    renamed = {"net": state["model"], "optimizer": {"m": torch.zeros(3)}}
    if isinstance(rename, dict):  # what a function makes of other names is unknown
        into["head"] = {"b": torch.zeros(1)}
        renamed["head"] = {"b": torch.zeros(1)}
        assert_same(restore(stored(state), into=into, select="model.*", rename=rename), renamed)
    into["net"]["b"] = torch.zeros(2)
    with pytest.raises(MismatchError, match=r"1 missing in the snapshot: net\.b"):
        restore(stored(state), into=into, select="model.*", rename=rename)
    with pytest.raises(MismatchError, match=r"1 missing in the snapshot: b"):
        restore(stored(state), into={"a": torch.zeros(2), "b": torch.zeros(2)}, select="model.*", rename={"model": ""})


def test_a_prefix_renames_what_is_selected_only_so_a_name_that_the_snapshot_has_elsewhere_is_missing() -> None:
    state = {"model": {"a": torch.ones(2), "b": torch.ones(2)}, "ema": {"a": torch.full((2,), 9.0)}}
    into = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    with pytest.raises(MismatchError, match=r"1 missing in the snapshot: model\.b"):
        restore(stored(state), into=into, select="ema.*", rename={"ema": "model"})
    del into["model"]["b"]
    assert_same(restore(stored(state), into=into, select="ema.*", rename={"ema": "model"}), {"model": {"a": state["ema"]["a"]}})


def test_rename_needs_into() -> None:
    with pytest.raises(InvalidOptionError, match="rename needs into="):
        restore(stored(STATE), rename={"a": "b"})


def test_damage_is_not_hidden() -> None:
    content = stored(STATE)
    content.fail = CorruptObjectError("damaged", object_id="packs/x")
    with pytest.raises(CorruptObjectError, match=r"^damaged$"):
        restore(content)


# --- lazy -------------------------------------------------------------------------------------------------------------


def test_the_mapping() -> None:
    snapshot = LazySnapshot(stored(STATE))
    assert (
        snapshot.names()
        == list(snapshot)
        == [
            "model.h.0.w",
            "model.h.0.b",
            "model.h.1.w",
            "optimizer.state.0.step",
            "optimizer.state.0.m",
            "queue.0",
            "queue.2.0",
            "array",
        ]
    )
    assert len(snapshot) == 8
    assert "model.h.0.w" in snapshot
    assert "epoch" not in snapshot
    assert snapshot.state_values == {"queue.1": 5, "queue.2.1": None, "epoch": 7}
    with pytest.raises(NotFoundError, match=r"(?m)^'x' is not in the snapshot; see \.names\(\)$"):
        snapshot["x"]
    with pytest.raises(KeyError, match="state_values"):
        snapshot["epoch"]


def test_what_a_tensor_reports_without_reading() -> None:
    content = stored(STATE)
    weight, array = LazySnapshot(content)["model.h.0.w"], LazySnapshot(content)["array"]
    assert (weight.shape, weight.dtype, weight.nbytes, len(weight)) == (torch.Size([2, 3]), torch.float32, 24, 2)
    assert (array.shape, array.dtype, array.nbytes) == ((4,), np.dtype(">f4"), 16)
    assert "model.h.0.w" in repr(weight)
    assert not content.reads
    assert not content.ranges


BASE = torch.arange(5 * 4 * 3.0).view(5, 4, 3)


@pytest.mark.parametrize(
    ("index", "start", "stop"),
    [
        (slice(None), 0, 240),
        (slice(1, 3), 48, 144),
        (slice(-2, None), 144, 240),
        (slice(1, 5, 2), 48, 192),
        (2, 96, 144),
        (-1, 192, 240),
        ((2, 1), 108, 120),
        ((2, slice(1, 3)), 108, 132),
        ((2, slice(1, 3), 0), 108, 132),
        ((2, 1, 1), 112, 116),
        ((slice(1, 2), 0), 48, 96),
        (..., 0, 240),
        ((..., 0), 0, 240),
        (None, 0, 240),
        ((1, None), 48, 96),
        (torch.tensor([0, 2]), 0, 240),
        ([0, 2], 0, 240),
        (np.int64(3), 144, 192),
        ((), 0, 240),
    ],
    ids=str,
)
def test_slices_read_what_they_need(index: Any, start: int, stop: int) -> None:
    content = stored({"x": BASE})
    assert_same(LazySnapshot(content)["x"][index], BASE[index])
    assert content.ranges == [(0, start, stop)]


def test_empty_slices_read_nothing() -> None:
    content = stored({"x": BASE, "array": np.zeros((2, 3)), "none": torch.zeros(0, 6, dtype=torch.int16).view(torch.complex32)})
    snapshot = LazySnapshot(content)
    assert_same(snapshot["x"][3:1], BASE[3:1])
    assert_same(snapshot["x"][9:, 1], BASE[9:, 1])
    assert_same(snapshot["array"][2:], np.zeros((0, 3)))
    assert snapshot["none"][:].shape == (0, 3)
    assert not content.ranges


def test_iteration_and_scalars() -> None:
    snapshot = LazySnapshot(stored({"x": BASE, "s": torch.tensor(3.0), "n": np.array(4.0)}))
    assert_same(torch.stack(list(snapshot["x"])), BASE)
    assert_same(snapshot["s"][...], torch.tensor(3.0))
    assert_same(snapshot["n"][()], np.array(4.0))
    with pytest.raises(InvalidOptionError, match="no dimensions"):
        len(snapshot["s"])


@pytest.mark.parametrize("index", [5, -6, (0, 9), (0, 0, 0, 0), slice(None, None, -1), slice("a", None), "x", slice(0, 2, 0), 1.5], ids=str)
def test_bad_indexes(index: Any) -> None:
    with pytest.raises(InvalidOptionError, match="'x'") as caught:
        LazySnapshot(stored({"x": BASE}))["x"][index]
    assert isinstance(caught.value, IndexError)


def test_views_and_arrays() -> None:
    array = np.arange(20, dtype=">i4").reshape(4, 5)
    state: dict[str, Any] = {
        "whole": BASE,
        "t": BASE[1].t(),
        "columns": BASE[:, 1],
        "reversed": array[::-1, ::-2],
        "array": array,
        "e": torch.ones(1).expand(9),
    }
    content = stored(state)
    snapshot = LazySnapshot(content)
    for name, value in state.items():
        assert_same(snapshot[name][:], np.ascontiguousarray(value) if isinstance(value, np.ndarray) else value)
        assert_same(snapshot[name][1:3], np.ascontiguousarray(value[1:3]) if isinstance(value, np.ndarray) else value[1:3])
    assert_same(snapshot["array"][::-1], array[::-1])
    content.ranges.clear()
    assert_same(snapshot["columns"][2], BASE[2, 1])
    assert content.ranges == [(0, (2 * 12 + 3) * 4, (2 * 12 + 6) * 4)]


@given(st.data())
def test_any_slice(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=3))
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    bound = st.none() | st.integers(-6, 6)
    index = data.draw(
        st.lists(st.builds(slice, bound, bound, st.none() | st.integers(1, 3)) | st.integers(-4, 3), max_size=len(shape)).map(tuple)
    )
    content = stored({"t": torch.from_numpy(array.copy()), "n": array.copy()})
    snapshot = LazySnapshot(content)
    try:
        expected = array[index]
    except IndexError:
        with pytest.raises(InvalidOptionError):
            snapshot["t"][index]
        return
    assert np.array_equal(snapshot["t"][index].numpy(), expected)
    assert np.array_equal(snapshot["n"][index], expected)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adagrad])
@pytest.mark.parametrize("target", ["new", "without a state", "without an optimizer"])
def test_a_conversion_leaves_the_scalars_of_optimizers_as_they_are(kind: type[torch.optim.Optimizer], target: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.LayerNorm(2))
    optimizer = kind(model.parameters(), lr=torch.tensor(0.1))  # type: ignore[call-arg]
    sum(parameter.sum() for parameter in model.parameters()).backward()  # type: ignore[union-attr]
    optimizer.step()
    for moments in optimizer.state.values():
        moments["step"].fill_(1001)
    state: dict[str, Any] = {"scale": torch.tensor(0.1), "optimizers": [optimizer.state_dict()]}
    into: Any = {
        "new": None,
        "without a state": {"scale": torch.zeros((), dtype=torch.bfloat16), "optimizers": [{"state": {}, "param_groups": []}]},
        "without an optimizer": {"scale": torch.zeros((), dtype=torch.bfloat16), "optimizers": None},
    }[target]
    found = restore(stored(state), into=into, dtype=torch.bfloat16)
    assert found["scale"].dtype is torch.bfloat16
    for name, moments in state["optimizers"][0]["state"].items():
        for key, tensor in moments.items():
            expected = tensor if tensor.numel() == 1 else tensor.bfloat16()
            assert_same(found["optimizers"][0]["state"][name][key], expected)
    assert_same(found["optimizers"][0]["param_groups"][0]["lr"], torch.tensor(0.1))


def test_a_selection_converts_an_optimizer_s_scalars_no_more_than_the_whole() -> None:
    state = {"optimizer": {"state": {0: {"step": torch.tensor(1001.0), "m": torch.ones(2)}}, "param_groups": []}}
    found = restore(stored(state), select=["optimizer.state.*"], dtype=torch.bfloat16)
    assert_same(found["optimizer"]["state"][0], {"step": torch.tensor(1001.0), "m": torch.ones(2, dtype=torch.bfloat16)})

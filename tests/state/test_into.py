"""Restoring into a state that is there: in place, all or nothing, and in step with what shares memory."""

import copy
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from tensorstore_ck.errors import MismatchError, UnsupportedValueError
from tensorstore_ck.state import LoadReport, capture, register_type, restore
from tests.effort import effort
from tests.state.fake import FakeContent, assert_same, bits, stored
from tests.state.samples import DTYPES, Pair, Point, states, tensor, zeros_like


def objects(state: Any) -> list[int]:
    """The ids of all tensors, arrays, dicts and lists in it."""
    found = [id(state)] if isinstance(state, torch.Tensor | np.ndarray | dict | list) else []
    for child in state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ():
        found += objects(child)
    return found


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": [torch.get_rng_state(), (3, tuple(range(625)), None)],
        "order": np.arange(50),
        "epoch": 3,
        "best": 0.5,
        "note": None,
    }


# --- in place ---------------------------------------------------------------------------------------------------------


def test_everything_is_filled_in_place() -> None:
    state = training_state()
    target = zeros_like(state)
    target |= {"epoch": 0, "best": None, "note": "x"}
    before = objects(target)
    assert restore(stored(state), into=target) is target
    assert_same(state, target)
    assert objects(target) == before


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_into_any_strides(dtype: torch.dtype) -> None:
    whole = tensor(dtype, (4, 5, 6))
    content = FakeContent(capture([whole]), 7)
    memory = tensor(dtype, (8, 6, 10), seed=1)
    for target in (memory[:4, :5, :6], memory.permute(2, 1, 0)[:4, :5, :6], memory[::2, 1:, 4:], tensor(dtype, (4, 5, 6), seed=2)):
        (back,) = restore(content, into=[target])
        assert back is target
        assert bits(back) == bits(whole)


def test_contiguous_memory_takes_the_bytes_directly() -> None:
    content = stored([torch.arange(1000.0), np.arange(1000)])
    target = [torch.zeros(1000), np.zeros(1000, np.int64)]
    seen: list[bool] = []
    original = content.read

    def read(targets: Mapping[int, Any]) -> None:
        seen.extend(target.memory() is not None for target in targets.values())
        original(targets)

    content.read = read  # type: ignore[method-assign]
    restore(content, into=target)
    assert seen == [True, True]
    assert_same([torch.arange(1000.0), np.arange(1000)], target)


def test_parameters_stay_parameters_and_autograd_notices() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3))
    result = (parameter * parameter).sum()
    restore(stored({"w": torch.ones(3)}), into={"w": parameter})
    assert parameter.tolist() == [1, 1, 1]
    assert parameter.requires_grad
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(result)


def test_inference_tensors() -> None:
    with torch.inference_mode():
        plain, strided = torch.zeros(2, 3), torch.zeros(3, 2).t()
        half = torch.zeros(2, 3, dtype=torch.float16)
    state = [torch.arange(6.0).view(2, 3)] * 2
    assert_same(state, restore(stored([state[0], state[0].clone()]), into=[plain, strided]), in_order=False)
    assert_same([state[0].half()], restore(stored(state[:1]), into=[half], dtype=torch.float16))


def test_immutable_containers_are_rebuilt() -> None:
    class Point(NamedTuple):
        x: Any
        y: Any

    weight = torch.zeros(2)
    target: dict[str, Any] = {"tuple": (weight, 1), "same": (weight[:0], torch.Size([1])), "list": [1, (2, 3)]}
    restore(stored({"tuple": (torch.ones(2), 5), "same": (torch.ones(0), torch.Size([1])), "list": [1, (2, 4)]}), into=target)
    assert target["tuple"][1] == 5
    assert target["tuple"][0] is weight
    assert weight.tolist() == [1, 1]
    assert target["list"] == [1, (2, 4)]
    point = Point(torch.zeros(1), 1)
    back = restore(stored({"x": torch.ones(1), "y": 2}), into=point)
    assert type(back) is Point
    assert back.x is point.x
    assert back.y == 2


def test_registered_types_are_rebuilt_around_their_tensors() -> None:
    register_type(Pair, "tests.Pair", lambda pair: {"left": pair.left, "right": pair.right}, lambda state: Pair(**state))
    weight = torch.zeros(2)
    back = restore(stored([Pair(torch.ones(2), 5)]), into=[Pair(weight, 1)])
    assert back[0].left is weight
    assert back[0].right == 5
    assert weight.tolist() == [1, 1]


def test_ordered_dict_attributes() -> None:
    model = torch.nn.BatchNorm1d(2)
    state = model.state_dict()
    target = copy.deepcopy(state)
    target._metadata[""]["version"] = 1  # type: ignore[attr-defined]
    restore(stored({"m": state}), into={"m": target})
    assert target._metadata == state._metadata  # type: ignore[attr-defined]


def test_values_of_any_length_are_replaced() -> None:
    state = {
        "perm": list(range(100)),
        "short": [1, 2, 3],
        "gone": [],
        "counter": Counter(a=1),
        "set": {1},
        "was none": {"a": [1]},
        "u": (1,) * 40,
    }
    target: dict[str, Any] = {
        "perm": [],
        "short": list(range(50)),
        "gone": [1],
        "counter": Counter(b=5),
        "set": set(),
        "was none": None,
        "u": (2,),
    }
    inner = target["perm"], target["short"], target["gone"]
    restore(stored(state), into=target)
    assert_same(state, target)
    assert inner[0] is target["perm"]
    assert inner[1] is target["short"]


def test_keys_of_any_type() -> None:
    state = {0: torch.ones(1), (1, "x"): {None: 5, "é": torch.ones(2)}}
    target = {0: torch.zeros(1), (1, "x"): {None: 0, "é": torch.zeros(2)}}
    restore(stored(state), into=target)
    assert_same(state, target)


# --- new tensors inside -----------------------------------------------------------------------------------------------


def test_meta_models_are_filled() -> None:
    def make() -> torch.nn.Module:
        model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False))
        model.get_submodule("1").weight = model.get_parameter("0.weight")
        return model

    source = make()
    with torch.device("meta"):
        model = make()
    state = restore(stored(source.state_dict()), into=model.state_dict())
    assert state["0.weight"].device.type == "cpu"
    assert state["0.weight"].data_ptr() == state["1.weight"].data_ptr()
    model.load_state_dict(state, assign=True)
    assert torch.equal(model.get_parameter("0.weight"), source.get_parameter("0.weight"))
    parameters = restore(stored(dict(source.named_parameters())), into={"0.weight": torch.nn.Parameter(torch.ones(5, 3, device="meta"))})
    assert type(parameters["0.weight"]) is torch.nn.Parameter
    one = torch.nn.Parameter(torch.ones(5, 3, device="meta"))
    again = restore(stored(source.state_dict()), into={"0.weight": one, "1.weight": one})
    assert again["0.weight"] is again["1.weight"] is not one


def test_meta_tensors_are_checked_and_converted_like_others() -> None:
    content = stored({"w": torch.arange(3.0)})
    with pytest.raises(MismatchError, match=r"w: shape \[4\] here, \[3\] in the snapshot"):
        restore(content, into={"w": torch.ones(4, device="meta")})
    with pytest.raises(MismatchError, match="w: bfloat16 here, float32 in the snapshot"):
        restore(content, into={"w": torch.ones(3, device="meta", dtype=torch.bfloat16)})
    target = {"w": torch.ones(3, device="meta", dtype=torch.bfloat16)}
    assert_same(restore(content, into=target, dtype=torch.bfloat16), {"w": torch.arange(3.0).bfloat16()})


def test_an_empty_dict_adopts_what_is_stored_there() -> None:
    state = training_state()
    fresh = torch.optim.AdamW(torch.nn.Linear(1, 1).parameters()).state_dict()
    target: dict[str, Any] = {"optimizer": {"state": fresh["state"], "param_groups": state["optimizer"]["param_groups"]}}
    assert target["optimizer"]["state"] == {}
    inner = target["optimizer"]["state"]
    restore(stored({"optimizer": state["optimizer"]}), into=target)
    assert_same(state["optimizer"], target["optimizer"])
    assert target["optimizer"]["state"] is inner


def test_types_are_checked_before_anything_is_read() -> None:
    content = stored({"w": torch.ones(1), "x": {"p": Point(torch.ones(1), 2)}})
    content.layout.tree[2][1][2][0][1] = "no.such.module:Point"
    with pytest.raises(UnsupportedValueError, match=r"import no\.such\.module"):
        restore(content, into={"w": torch.zeros(1), "x": {}})
    assert not content.reads


def test_an_empty_root_adopts_everything() -> None:
    state = training_state()
    target: dict[str, Any] = {}
    assert restore(stored(state), into=target) is target
    assert_same(state, target)
    other: defaultdict[str, Any] = defaultdict(dict)
    assert restore(stored(state), into=other, select=["model.*"]) is other
    assert list(other) == ["model"]


def test_what_is_adopted_shares_memory_with_nothing_in_place() -> None:
    base = torch.arange(10.0)
    content = stored({"here": base, "there": {"view": base[2:5]}})
    target: dict[str, Any] = {"here": torch.zeros(10), "there": {}}
    restore(content, into=target)
    assert_same(target, {"here": base, "there": {"view": base[2:5]}})


# --- shared memory ----------------------------------------------------------------------------------------------------


def test_tied_targets_are_filled_once() -> None:
    weight = torch.arange(6.0).view(2, 3)
    content = stored({"a": weight, "b": weight.view(3, 2), "c": weight.t(), "d": weight[1]})
    memory = torch.zeros(2, 3)
    target = {"a": memory, "b": memory.view(3, 2), "c": memory.t(), "d": memory[1]}
    restore(content, into=target)
    assert content.reads == [0]
    assert_same(target, {"a": weight, "b": weight.view(3, 2), "c": weight.t(), "d": weight[1]})


def test_tied_in_the_snapshot_but_not_here() -> None:
    weight = torch.arange(6.0).view(2, 3)
    content = stored({"a": weight, "b": weight.view(3, 2), "c": weight.t()})
    target = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 3).view(3, 2), "c": torch.zeros(3, 2)}
    restore(content, into=target)
    assert content.reads == [0]
    assert_same(target, {"a": weight, "b": weight.view(3, 2), "c": weight.t()}, in_order=False)


def test_tied_here_but_not_in_the_snapshot() -> None:
    content = stored({"a": torch.ones(3), "b": torch.full((3,), 2.0), "c": torch.zeros(3)})
    memory = torch.full((3,), -1.0)
    target = {"a": memory, "b": memory.view(3), "c": torch.ones(3)}
    with pytest.raises(MismatchError, match="1 do not match: b: shares memory with a here; the snapshot has different values of the two"):
        restore(content, into=target)
    assert memory.tolist() == [-1, -1, -1]
    report = LoadReport()
    restore(content, into=target, strict=False, report=report)
    assert report.mismatched == ["b: shares memory with a here; the snapshot has different values of the two"]
    assert memory.tolist() == [1, 1, 1]
    assert target["c"].tolist() == [0, 0, 0]


def test_sharing_in_another_way_than_in_the_snapshot() -> None:
    weight = torch.arange(6.0).view(2, 3)
    content = stored({"a": weight, "row": weight[0], "tail": weight[1, 1:]})
    memory = torch.zeros(6)
    with pytest.raises(
        MismatchError, match="2 do not match: row: shares memory with a here; the snapshot has different values of the two, tail: "
    ):
        restore(content, into={"a": memory.view(3, 2).t(), "row": memory[:3], "tail": memory[4:]})
    half = torch.zeros(2, 3, dtype=torch.float16)
    back = restore(content, into={"a": half, "row": half[0], "tail": half[1, 1:]}, dtype=torch.float16)
    assert_same(back, {"a": weight.half(), "row": weight[0].half(), "tail": weight[1, 1:].half()})


def test_one_stored_tensor_into_several() -> None:
    weight = torch.arange(6.0).view(2, 3)
    state = [weight, weight, weight]
    assert_same(state, restore(stored(state), into=[torch.zeros(3, 2).t(), torch.zeros(2, 3), torch.zeros(3, 2).t()]), in_order=False)


def test_columns_of_one_matrix_may_be_stored_apart() -> None:
    memory = torch.zeros(4, 6)
    state = [torch.ones(4, 2), torch.full((4, 4), 2.0)]
    assert_same(state, restore(stored(state), into=[memory[:, :2], memory[:, 2:]]))


def test_without_the_base_itself() -> None:
    """Overlapping views, none of which covers the others, go through a temporary tensor; arrays, too."""
    flat, array = torch.arange(100.0), np.arange(30)
    state = {"left": flat[:60], "right": flat[40:], "a": array[:20], "b": array[10:][::-1], "expanded": torch.ones(2, 1).expand(2, 5)}
    target = zeros_like(state)
    restore(stored(state), into=target)
    assert_same(state, target)
    apart = {name: (value.copy() if isinstance(value, np.ndarray) else value.clone()) for name, value in zeros_like(state).items()}
    restore(stored(state), into=apart)
    assert_same(state, apart)


def test_expanded_targets_must_be_so_in_the_snapshot() -> None:
    with pytest.raises(MismatchError, match="x: the tensor here is expanded"):
        restore(stored({"x": torch.arange(5.0)}), into={"x": torch.zeros(1).expand(5)})


def test_a_target_that_begins_at_an_odd_offset() -> None:
    base = torch.arange(16, dtype=torch.uint8)
    state = {"bytes": base, "floats": base[4:8].view(torch.float32)}
    memory = torch.zeros(17, dtype=torch.uint8)
    target = {"bytes": memory[1:], "floats": torch.zeros(1)}
    restore(stored(state), into=target)
    assert_same(state, target)


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # from deepcopy
@settings(max_examples=effort(40, 200))
@given(states)
def test_any_state_into_a_copy_of_itself(state: Any) -> None:
    content = stored(state)
    target = zeros_like(state)
    assert_same(state, restore(content, into=target))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    base = torch.arange(60.0, device="cuda").view(6, 10)
    state = {
        "base": base,
        "t": base.t(),
        "left": base[:, :3],
        "cpu": torch.ones(3),
        "array": np.ones(3),
        "p": torch.nn.Parameter(base[0].clone()),
    }
    content = FakeContent(capture(state), 7)
    back = restore(content, device="cuda")
    assert_same(back["t"].cpu(), state["t"].cpu())  # type: ignore[attr-defined]
    assert back["t"].data_ptr() == back["base"].data_ptr()
    assert back["cpu"].device.type == "cuda"
    target = {"base": torch.zeros(6, 10, device="cuda").t().contiguous().t(), "p": torch.zeros(10, device="cuda", dtype=torch.bfloat16)}
    restore(content, into=target, select=["base", "p"], dtype=torch.bfloat16)
    assert torch.equal(target["base"], base)
    assert torch.equal(target["p"], base[0].bfloat16())

"""States that a handle saves again and again, and one thing that differs then: it must be seen, whatever is known of the save before."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import UnsupportedValueError
from tensorstore_ck.state import capture
from tensorstore_ck.state.capture import CaptureWalk
from tests.effort import PATIENCE_SECONDS
from tests.state.fake import assert_same


def state_of() -> dict[str, Any]:
    model = OrderedDict({f"layers.{number}": torch.nn.Parameter(torch.full((2, 3), float(number))) for number in range(300)})
    model._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
    moments = {number: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(2, 3)} for number in range(3)}
    return {
        "model": model,
        "optimizer": {"state": moments, "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1, 2], "maximize": False}]},
        "more": [torch.zeros(0, 3), "text", torch.ones(3, dtype=torch.complex64), None, torch.zeros(4, 1), torch.zeros(0, 3)],
        "alike": [[torch.zeros(2)], {0: torch.zeros(2)}, [torch.zeros(2)]],
        "steps": torch.zeros(2, 3, dtype=torch.int32),
    }


def replace(*path: Any, by: Callable[[Any], Any]) -> Callable[[dict[str, Any]], None]:
    def change(state: Any) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = by(state[path[-1]])

    return change


def moment(change: Callable[[torch.Tensor], object]) -> Callable[[dict[str, Any]], object]:
    return lambda state: change(state["optimizer"]["state"][1]["exp_avg"])


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "nothing": lambda _: None,
    "elements": moment(lambda tensor: tensor.add_(7)),
    "another object": replace("optimizer", "state", 1, "exp_avg", by=lambda tensor: tensor + 7),
    "another shape": replace("optimizer", "state", 1, "exp_avg", by=lambda tensor: tensor.reshape(6)),
    "resized in place": moment(lambda tensor: tensor.resize_(3, 3).fill_(7)),
    "other data": moment(lambda tensor: setattr(tensor, "data", torch.arange(6.0).reshape(2, 3))),
    "other data in the middle of a storage": moment(lambda tensor: setattr(tensor, "data", torch.arange(9.0)[3:].view(2, 3))),
    "another dtype": replace("optimizer", "state", 1, "exp_avg", by=torch.Tensor.int),
    "other strides": replace("optimizer", "state", 1, "exp_avg", by=lambda tensor: torch.arange(6.0).reshape(3, 2).t()),
    "other strides of an extent of 1": replace("more", 4, by=lambda tensor: tensor.as_strided((4, 1), (1, 4))),
    "a conjugate": replace("more", 2, by=lambda tensor: (tensor * 1j).conj()),
    "a negative view": replace("optimizer", "state", 1, "exp_avg", by=lambda tensor: torch._neg_view(tensor + 1)),
    "a gradient": moment(lambda tensor: tensor.requires_grad_()),
    "a parameter": replace("optimizer", "state", 1, "exp_avg", by=lambda tensor: torch.nn.Parameter(tensor, requires_grad=False)),
    "no parameter": replace("model", "layers.299", by=lambda tensor: tensor.detach()),
    "one object twice": lambda state: state["optimizer"]["state"][1].update(exp_avg=state["optimizer"]["state"][2]["exp_avg"]),
    "one empty object twice": lambda state: state["more"].__setitem__(5, state["more"][0]),
    "shared memory": lambda state: state["optimizer"]["state"][1].update(exp_avg=state["optimizer"]["state"][2]["exp_avg"].view(2, 3)),
    "a larger storage": moment(lambda tensor: tensor.untyped_storage().resize_(100)),
    "a value": replace("optimizer", "param_groups", 0, "lr", by=lambda _: 0.2),
    "a value more": lambda state: state["optimizer"]["param_groups"][0].update(eps=1e-8),
    "a value of another type": replace("optimizer", "param_groups", 0, "maximize", by=lambda _: 0),
    "a value for a tensor": replace("optimizer", "state", 1, "exp_avg", by=lambda _: 1.0),
    "a tensor for a value": replace("optimizer", "param_groups", 0, "lr", by=torch.tensor),
    "an array for a value": replace("more", 1, by=lambda _: np.arange(3)),
    "other numbers": replace("optimizer", "param_groups", 0, "params", by=lambda _: [2, 1, 0]),
    "more numbers": replace("optimizer", "param_groups", 0, "params", by=lambda _: [2, 1, 0, 3]),
    "a key more": lambda state: state["optimizer"]["state"].update({3: {"step": torch.tensor(1.0)}}),
    "a key less": lambda state: state["optimizer"]["state"].pop(1),
    "another key": replace("optimizer", "state", by=lambda state: {True if key == 1 else key: item for key, item in state.items()}),
    "another order of keys": lambda state: state["optimizer"]["state"].update({0: state["optimizer"]["state"].pop(0)}),
    "another container": replace("more", by=tuple),
    "other attributes": lambda state: state["model"]._metadata[""].update(version=2),
    "no attributes": replace("model", by=OrderedDict),
    "an item more": lambda state: state["more"].append(1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_differs_under_the_same_names_is_seen(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    state = state_of()
    with tsck.open(tmp_path / "store", create=True) as store:
        for _ in range(3):  # its names are known, then its structure, then that is used
            store.put_snapshot(state, ref="main", unchanged="ok")
        change(state)
        for _ in range(3):
            store.put_snapshot(state, ref="main", unchanged="ok")
            restored = store.checkout("main")
            assert_same(restored, state)
            taken, again = capture(state), capture(restored)
            assert (again.layout.encode(), again.values) == (taken.layout.encode(), taken.values)


def test_a_structure_that_is_known_is_not_walked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walked = list[object]()
    visit = CaptureWalk.visit

    def counted(self: CaptureWalk, state: object) -> None:
        walked.append(state)
        visit(self, state)

    monkeypatch.setattr(CaptureWalk, "visit", counted)
    with tsck.open(tmp_path / "store", create=True) as store:
        for _ in range(3):
            store.put_snapshot(state_of(), ref="main", unchanged="ok")
        store.put_snapshot_async(state_of(), ref="main", unchanged="ok").wait(PATIENCE_SECONDS)
    assert len(walked) == 2


def only_a_part(tensor: torch.Tensor) -> torch.Tensor:
    for name, numbers in {"global_shape": (4, 3), "global_offsets": (0, 0), "local_offsets": ((0, 0),), "local_sizes": ((2, 3),)}.items():
        setattr(tensor, name, numbers)
    return tensor


def without_memory(tensor: torch.Tensor) -> torch.Tensor:
    tensor.untyped_storage().resize_(8)
    return tensor


@pytest.mark.parametrize("change", [without_memory, only_a_part, lambda tensor: tensor.to("meta")])
def test_what_can_no_longer_be_stored_is_refused(tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state = state_of()
    with tsck.open(tmp_path / "store", create=True) as store:
        for _ in range(3):
            store.put_snapshot(state, ref="main", unchanged="ok")
        replace("optimizer", "state", 1, "exp_avg", by=change)(state)
        with pytest.raises(UnsupportedValueError, match=r"optimizer\.state\.1\.exp_avg"):
            store.put_snapshot(state, ref="main", unchanged="ok")

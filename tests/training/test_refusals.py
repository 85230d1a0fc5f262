"""What does not fit is refused before anything is changed, with what it is and what to do."""

from typing import Any

import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState
from tests.training.job import Loader

LINEAR = nn.Linear(2, 2)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": "gpt"}, "model must be a torch.nn.Module, not a builtins.str"),
    "one of the models": ({"model": {"a": LINEAR, "b": object()}}, r"model\.b must be a torch.nn.Module"),
    "twice": ({"model": [LINEAR, LINEAR]}, "model= has an object twice"),
    "keys": ({"model": {1: LINEAR}}, "must have strings as keys"),
    "optimizer": ({"model": LINEAR, "optimizer": LINEAR}, "optimizer must be a torch optimizer"),
    "no model": (
        {"optimizer": torch.optim.SGD(LINEAR.parameters())},
        r"parameters of no given model \(2 of 2\): pass all models that it trains in model=",
    ),
    "another model's": (
        {"model": LINEAR, "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())},
        r"parameters of no given model \(2 of 2\)",
    ),
    "of tensors": (
        {"model": LINEAR, "optimizer": torch.optim.SGD([torch.zeros(2, requires_grad=True), *LINEAR.parameters()])},
        r"parameters of no given model \(1 of 3\).*keep them in a torch.nn.ParameterDict",
    ),
    "scheduler": ({"scheduler": 1}, "scheduler must be something with state_dict and load_state_dict"),
    "loader": (
        {"dataloader": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(1)))},
        "such as a tsck.SampleCursor or torchdata's StatefulDataLoader, not a torch",
    ),
    "extra": ({"extra": [1]}, "extra= must be a dict"),
    "rank_values": ({"rank_values": [1]}, "rank_values= must be a dict"),
    "dots": ({"model": {"a": LINEAR, "a.b": nn.Linear(2, 2)}}, "dots"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_has_no_state(name: str) -> None:
    parts, message = BAD[name]
    with pytest.raises(tsck.InvalidOptionError, match=message):
        TrainingState(**parts)


def test_a_model_without_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(tsck.UnsupportedValueError, match=r"meta device: give them memory first \(model.to_empty"):
        TrainingState(model=model)


def test_what_cannot_be_stored_is_named(store: tsck.Store) -> None:
    with pytest.raises(tsck.UnsupportedValueError, match=r"cannot store extra\.thing: it is a builtins.object"):
        TrainingState(extra={"thing": object()}).put(store, ref="r")


def built(width: int = 4, **more: Any) -> tuple[nn.Module, TrainingState]:
    model = nn.Sequential(nn.Linear(2, width), nn.Linear(width, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, TrainingState(model=model, optimizer=optimizer, **more)


class Taker:
    """Takes no state."""

    def state_dict(self) -> dict[str, int]:
        return {"a": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("b")


def groups() -> tuple[nn.Module, TrainingState]:
    model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW([{"params": [each]} for each in model.parameters()])
    return model, TrainingState(model=model, optimizer=optimizer)


PUT: dict[str, Any] = {
    "scheduler": None,
    "scaler": torch.amp.GradScaler(device="cpu"),
    "dataloader": Loader(),
    "extra": {"n": 1, "g": torch.Generator(), "h": torch.Generator()},
}
MISFITS: dict[str, tuple[Any, str]] = {
    "another model": (lambda: built(5, **PUT), r"model\.0\.weight: shape \[5, 2\] here, \[4, 2\] in the snapshot"),
    "no optimizer": (lambda: (LINEAR, TrainingState(model=built()[0], **PUT)), r"not expected by `into`: optimizer\."),
    "a schedule more": (
        lambda: built(**(PUT | {"scheduler": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(LINEAR.parameters()), 1)})),
        "missing in the snapshot: scheduler",
    ),
    "no scaler": (lambda: built(**(PUT | {"scaler": None})), r"not expected by `into`: scaler\."),
    "no loader": (lambda: built(**(PUT | {"dataloader": None})), "states of dataloader, which this TrainingState lacks"),
    "a cursor": (lambda: built(**(PUT | {"dataloader": tsck.SampleCursor(9, batch_size=3)})), "states of dataloader, which this"),
    "another loader": (lambda: built(**(PUT | {"dataloader": {"a": Loader()}})), "no state of dataloader.a: it was saved without"),
    "an extra more": (lambda: built(**(PUT | {"extra": {**PUT["extra"], "more": 1}})), "missing in the snapshot: extra.more"),
    "an extra less": (
        lambda: built(**(PUT | {"extra": {"g": torch.Generator(), "h": torch.Generator()}})),
        "not expected by `into`: extra.n",
    ),
    "a generator more": (
        lambda: built(**(PUT | {"extra": {**PUT["extra"], "i": torch.Generator()}})),
        "no state of extra.i: it was saved without",
    ),
    "a generator less": (
        lambda: built(**(PUT | {"extra": {"n": 1, "g": torch.Generator()}})),
        r"states of extra\.h, which this TrainingState lacks",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_snapshot_of_another_job(store: tsck.Store, name: str) -> None:
    built(**PUT)[1].put(store, ref="runs/job")
    make, message = MISFITS[name]
    model, training = make()
    before = [each.detach().clone() for each in model.parameters()]
    generators = torch.get_rng_state()
    with pytest.raises(tsck.MismatchError, match=message):
        training.restore(store, "runs/job")
    for one, two in zip(model.parameters(), before, strict=True):
        assert torch.equal(one, two)
    assert torch.equal(torch.get_rng_state(), generators)


def test_other_parameter_groups(store: tsck.Store) -> None:
    built()[1].put(store, ref="runs/job")
    with pytest.raises(tsck.MismatchError, match="parameter groups of optimizer hold other parameters"):
        groups()[1].restore(store, "runs/job")


def test_an_object_that_does_not_take_its_state(store: tsck.Store) -> None:
    training = TrainingState(scheduler={"odd": Taker()})
    training.put(store, ref="runs/job")
    with pytest.raises(tsck.MismatchError, match=r"scheduler\.odd does not take its state from the snapshot: KeyError: 'b'"):
        training.restore(store, "runs/job")


def test_what_was_saved_by_hand(store: tsck.Store) -> None:
    store.put_snapshot({"model": LINEAR.state_dict()}, ref="by-hand")
    with pytest.raises(tsck.MismatchError, match=r"was not saved by TrainingState.put: restore it with store.checkout"):
        TrainingState(model=LINEAR).restore(store, "by-hand")


def test_a_gradient_of_no_parameter(store: tsck.Store) -> None:
    _, training = built()
    training.put(store, ref="runs/job", gradients=True)
    state = store.checkout("runs/job")
    state["rank"]["gradients"]["other"] = torch.zeros(2)
    store.put_snapshot(state, ref="runs/job")
    with pytest.raises(tsck.MismatchError, match="a gradient of 'other'"):
        training.restore(store, "runs/job")


def test_another_model_on_the_same_ref_is_told_to_take_another_one(store: tsck.Store) -> None:
    TrainingState(model=nn.Linear(2, 2)).put(store, ref="runs/one", step=1)
    with pytest.raises(
        tsck.MismatchError, match=r"^'runs/one' holds another model or optimizer .* give this one a ref of its own \(.*model\.0\."
    ):
        built()[1].restore(store, "runs/one")

"""Names of parameters do not depend on what wraps the model or its layers."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.nn.parallel import DataParallel, DistributedDataParallel

import tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState
from tests.group_of_one import group_of_one

Wrap = Callable[[nn.Module], nn.Module]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value] # nothing calls it, so nothing is compiled


def of_layers(wrap: Wrap) -> Wrap:
    def wrapped(model: nn.Module) -> nn.Module:
        layers = model.get_submodule("layers")
        for name, layer in layers.named_children():
            layers.register_module(name, wrap(layer))
        return model

    return wrapped


WRAPPERS: dict[str, Wrap] = {
    "plain": lambda model: model,
    "compile": compiled,
    "DDP": DistributedDataParallel,
    "compile(DDP)": lambda model: compiled(DistributedDataParallel(model)),
    "DDP(compile)": lambda model: DistributedDataParallel(compiled(model)),
    "DataParallel": DataParallel,
    "DataParallel(compile)": lambda model: DataParallel(compiled(model)),
    "checkpoint": checkpoint_wrapper,
    "layers: checkpoint": of_layers(checkpoint_wrapper),
    "layers: compile": of_layers(compiled),
    "layers: checkpoint(compile)": of_layers(lambda layer: checkpoint_wrapper(compiled(layer))),
    "layers: compile(checkpoint)": of_layers(lambda layer: compiled(checkpoint_wrapper(layer))),
    "layers: checkpoint(compile(checkpoint))": of_layers(lambda layer: checkpoint_wrapper(compiled(checkpoint_wrapper(layer)))),
    "layers: checkpoint(DataParallel)": of_layers(lambda layer: checkpoint_wrapper(DataParallel(layer))),
    "layers: offload": of_layers(offload_wrapper),
    "DDP(compile(layers: checkpoint(compile)))": lambda model: DistributedDataParallel(
        compiled(of_layers(lambda layer: checkpoint_wrapper(compiled(layer)))(model))
    ),
    "script": torch.jit.script,
}


@pytest.fixture(scope="module", autouse=True)
def _group() -> Iterator[None]:
    with group_of_one():
        yield


def made(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
    """After a step of its optimizer, with gradients made by hand."""
    torch.manual_seed(seed)
    model = WRAPPERS[name](Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer, TrainingState(model=model, optimizer=optimizer)


def of_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[each]["exp_avg"] for each in model.parameters()]
    return [*model.parameters(), *model.buffers(), *moments]


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_saved_by_its_own_names(store: tsck.Store, name: str) -> None:
    saved, optimizer, training = made(name, 1)
    expected = [each.detach().clone() for each in of_state(saved, optimizer)]
    training.put(store, ref="r", step=1)
    assert [*store.checkout("r")["model"]] == [*Net().state_dict()]
    model, optimizer, training = made(name, 2)
    training.restore(store, "r")
    for one, two in zip(of_state(model, optimizer), expected, strict=True):
        assert torch.equal(one, two)


def test_a_snapshot_with_names_of_wrappers(store: tsck.Store) -> None:
    """Earlier builds saved such names for compiled layers within activation checkpointing."""
    name = "layers: checkpoint(compile)"
    saved, _, training = made(name, 1)
    state = training.captured()
    state["model"] = {key.replace("layers.0.", "layers.0._orig_mod."): each for key, each in state["model"].items()}
    store.put_snapshot(state, ref="r", step=1)
    model, _, training = made(name, 2)
    training.restore(store, "r")
    for one, two in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, two)

"""Optimizers whose state is not that of torch's own: restored exactly, or refused when the `TrainingState` is created."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState
from tests.group_of_one import group_of_one
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS, Pool, opened


class Lookahead(torch.optim.AdamW):
    """Has another optimizer's state below a name of its own."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {"base": super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state["base"])
        self.steps = state["steps"]


class Averager(torch.optim.AdamW):
    """As torch's PostLocalSGDOptimizer, which adds a counter."""

    steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]
        super().load_state_dict({name: each for name, each in state.items() if name != "steps"})


class ByName(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        state["param_groups"] = [{**group, "params": [f"p{number}" for number in group["params"]]} for group in state["param_groups"]]
        return state


class OnRankZero(torch.optim.AdamW):
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("Optimizer state has not been consolidated")


REFUSED: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "no state": (Lookahead, r"optimizer is a Lookahead .* Pass it as extra=\{\"optimizer\": optimizer\}"),
    "names": (ByName, "optimizer is a ByName .* not of the form of torch's optimizers"),
    "cannot be read": (OnRankZero, "optimizer is a OnRankZero .* fails on this rank: RuntimeError: Optimizer state has not been"),
}


def stepped(model: nn.Module, optimizer: Any) -> Any:
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    optimizer.steps = 7
    return optimizer


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_named_is_refused_at_the_start(name: str) -> None:
    kind, message = REFUSED[name]
    model = nn.Linear(2, 2)
    with pytest.raises(tsck.UnsupportedValueError, match=message):
        TrainingState(model=model, optimizer=kind(model.parameters()))


@pytest.mark.parametrize(("argument", "kind"), [("extra", Lookahead), ("optimizer", Averager)])
def test_all_that_an_optimizer_keeps_is_restored(store: tsck.Store, argument: str, kind: type[Any]) -> None:
    """In `extra=`, as the refusal of the first says; the second has its own entry."""

    def training(model: nn.Module, optimizer: Any) -> TrainingState:
        given: dict[str, Any] = {argument: {"optimizer": optimizer}}
        return TrainingState(model=model, **given)

    saved = nn.Linear(2, 2)
    old = stepped(saved, kind(saved.parameters()))
    training(saved, old).put(store, ref="r", step=1)
    model = nn.Linear(2, 2)
    new = kind(model.parameters())
    training(model, new).restore(store, "r")
    assert new.steps == 7
    assert torch.equal(new.state[model.weight]["exp_avg"], old.state[saved.weight]["exp_avg"])


def test_tensors_of_no_module_have_names_in_a_parameter_dict(store: tsck.Store) -> None:
    def made(value: float) -> tuple[nn.ParameterDict, torch.optim.Optimizer, TrainingState]:
        latents = nn.ParameterDict({"z": nn.Parameter(torch.full((3,), value))})
        optimizer = stepped(latents, torch.optim.AdamW(latents.parameters()))
        return latents, optimizer, TrainingState(model={"latents": latents}, optimizer=optimizer)

    saved, old, training = made(1.0)
    training.put(store, ref="r", step=1)
    latents, new, training = made(2.0)
    training.restore(store, "r")
    assert torch.equal(latents["z"], saved["z"])
    assert torch.equal(new.state[latents["z"]]["exp_avg"], old.state[saved["z"]]["exp_avg"])


@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_an_optimizer_of_fewer_parameters_is_another_one(store: tsck.Store, momentum: float) -> None:
    """With and without a state of the parameter that is left out."""
    model = nn.Linear(2, 2)
    TrainingState(model=model, optimizer=stepped(model, torch.optim.SGD(model.parameters(), 0.1, momentum=momentum))).put(store, ref="r")
    fewer = torch.optim.SGD([model.weight], 0.1, momentum=momentum)
    with pytest.raises(tsck.MismatchError, match="optimizer.state.bias" if momentum else "parameter groups of optimizer hold other"):
        TrainingState(model=model, optimizer=fewer).restore(store, "r")


@pytest.mark.parametrize("is_new", [False, True])
def test_an_optimizer_whose_state_grows_is_restored_after_other_numbers_of_steps(store: tsck.Store, is_new: bool) -> None:
    """LBFGS keeps a list with an entry for each step; a loop that goes back restores into what has stepped on, or begun again."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    training = TrainingState(model=model, optimizer=optimizer)

    def step() -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = (model(torch.eye(2)) - 1).square().sum()
            loss.backward()
            return loss

        return optimizer.step(closure)  # type: ignore[no-untyped-call]

    for _ in range(3):
        step()
    training.put(store, ref="r", step=3)
    next_loss = [step() for _ in range(2)][1]
    if is_new:
        optimizer.state.clear()
    step()
    training.restore(store, "r")
    assert [step() for _ in range(2)][1] == next_loss


OTHERS: dict[str, tuple[Any, Any]] = {
    "Adam -> Adagrad": (torch.optim.AdamW, torch.optim.Adagrad),
    "SGD -> Adam": (partial(torch.optim.SGD, momentum=0.9), torch.optim.Adam),
    "Adam -> amsgrad": (torch.optim.Adam, partial(torch.optim.Adam, amsgrad=True)),
    "Adam -> LBFGS": (torch.optim.Adam, torch.optim.LBFGS),
}


@pytest.mark.parametrize("kinds", OTHERS.values(), ids=OTHERS)
def test_another_optimizer_that_has_a_state_is_refused_and_the_model_stays(store: tsck.Store, kinds: tuple[Any, Any]) -> None:
    def trained(kind: Any) -> tuple[nn.Module, TrainingState]:
        model = nn.Linear(2, 2)
        optimizer = kind(model.parameters(), lr=0.1)

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(torch.eye(2)) - 1).square().sum()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(2):
            loss()
            optimizer.step(loss)
        return model, TrainingState(model=model, optimizer=optimizer)

    trained(kinds[0])[1].put(store, ref="r", step=1)
    model, training = trained(kinds[1])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(tsck.MismatchError, match="holds another model or optimizer"):
        training.restore(store, "r")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_nested_state_is_restored_in_place(store: tsck.Store) -> None:
    class Nested(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                state.setdefault("factors", {"left": torch.zeros_like(parameter), "rows": [torch.zeros(2)]})["left"].add_(1)
                state.setdefault("history", [])

    model = nn.Linear(2, 2)
    optimizer = Nested(model.parameters())
    training = TrainingState(model=model, optimizer=optimizer)
    optimizer.step()
    training.put(store, ref="r", step=1)
    optimizer.step()
    held = optimizer.state[model.weight]["factors"]["left"]
    training.restore(store, "r")
    state = optimizer.state[model.weight]
    assert state["factors"]["left"].data_ptr() == held.data_ptr()
    assert torch.equal(held, torch.ones(2, 2))
    assert state["history"] == []


# --- ZeroRedundancyOptimizer --------------------------------------------------------------------------------------------


@pytest.fixture
def _group() -> Iterator[None]:
    with group_of_one():
        yield


def zero(model: nn.Module, ranks: int, **options: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which torch uses there
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(
        [{"params": [each]} if each.dim() > 1 else {"params": [each], "weight_decay": 0.0} for each in model.parameters()],
        optimizer_class=torch.optim.AdamW,
        process_group=GROUPS.get(ranks),
        lr=0.1,
        **options,
    )


def plain(model: nn.Module, ranks: int) -> Any:
    groups = [{"params": [each]} if each.dim() > 1 else {"params": [each], "weight_decay": 0.0} for each in model.parameters()]
    return torch.optim.AdamW(groups, lr=0.1)


KINDS: dict[str, Callable[[nn.Module, int], Any]] = {"zero": zero, "plain": plain}


class Job:
    """Gradients are made by hand, equal on all ranks."""

    def __init__(self, kind: str, ranks: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.optimizer = KINDS[kind](self.model, ranks)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.training = TrainingState(model=self.model, optimizer=self.optimizer, scheduler=self.scheduler)

    def step(self) -> None:
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = torch.full_like(parameter, number + 1.0)
        self.optimizer.step()
        self.scheduler.step()

    def state(self) -> list[Any]:
        """After the next step: that shows the moments."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.step()
        return [rates, *(each.tolist() for each in self.model.parameters())]


def put(store: tsck.Store, kind: str, ranks: int, group: Any) -> list[Any]:
    job = Job(kind, ranks, 1)
    job.step()
    job.step()
    job.training.put(store, ref=f"{kind}/{ranks}", step=2, group=group, timeout_seconds=TIMEOUT_SECONDS)
    return job.state()


def restore(store: tsck.Store, address: str, kind: str, ranks: int, group: Any) -> list[Any]:
    job = Job(kind, ranks, 2)
    job.step()
    job.training.restore(store, address, group=group, timeout_seconds=TIMEOUT_SECONDS)
    return job.state()


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(("kind", "again"), [("zero", "plain"), ("plain", "zero")])
def test_zero_and_plain_optimizers_restore_each_other(store: tsck.Store, kind: str, again: str) -> None:
    """With the rate that a schedule has set, which the optimizer behind ZeRO's gets with its next step only."""
    expected = put(store, kind, 1, dist.group.WORLD)
    assert restore(store, f"{kind}/1", again, 1, dist.group.WORLD) == expected


def put_as_rank(folder: str, kind: str, ranks: int) -> list[Any]:
    return put(opened(folder, ranks), kind, ranks, GROUPS[ranks])


def restore_as_rank(folder: str, address: str, kind: str, ranks: int) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tsck.EnvironmentChangedWarning)  # another number of ranks
        return restore(opened(folder, ranks), address, kind, ranks, GROUPS[ranks])


@pytest.mark.slow
def test_zero_restores_on_any_number_of_ranks(pool: Pool, folder: Path) -> None:
    ways = {("zero", 3): [("zero", 3), ("zero", 2), ("zero", 4), ("plain", 1)], ("plain", 2): [("zero", 3)]}
    for (kind, ranks), others in ways.items():
        expected = pool.run(put_as_rank, str(folder), kind, ranks, ranks=ranks)
        assert expected == [expected[0]] * ranks
        for again, other in others:
            restored = pool.run(restore_as_rank, str(folder), f"{kind}/{ranks}", again, other, ranks=other)
            assert restored == [expected[0]] * other, (kind, again, other)


@pytest.mark.usefixtures("_group")
def test_zero_within_the_backward_pass_is_refused() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = zero(model, 1, overlap_with_ddp=True)
    with pytest.raises(tsck.UnsupportedValueError, match="create it with overlap_with_ddp=False"):
        TrainingState(model=model, optimizer=optimizer)

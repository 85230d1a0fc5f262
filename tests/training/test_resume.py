"""One process: a job that is restored goes on with the same bits as one that was never stopped."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import tensorstore_ck as tsck
from tensorstore_ck.training import TrainingState
from tests.training.job import Job, Loader, make, run, seed

STEPS = 6


# --- bit for bit --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 7])
def test_a_restored_job_goes_on_bit_for_bit(store: tsck.Store, before: int) -> None:
    """From before the first step (the optimizer has no state), and from the middle of the second epoch."""
    job = make()
    run(job, before)
    snapshot = job.training.put(store, ref="runs/job", step=before)
    expected = run(job, STEPS)
    other = make(99)
    assert other.training.restore(store, "runs/job") == snapshot
    assert other.training.captured()["extra"]["seen"] == before * 8
    assert run(other, STEPS) == expected


def test_the_job_that_saved_is_rolled_back(store: tsck.Store) -> None:
    """Its optimizer has stepped since, and had not then."""
    job = make()
    job.training.put(store, ref="runs/job", step=0)
    expected = run(job, STEPS)
    job.training.put(store, ref="runs/job", step=STEPS)
    assert job.training.restore(store, "runs/job@0") is not None
    assert not job.optimizer.state
    assert run(job, STEPS) == expected


def test_a_loader_that_draws_while_it_loads_moves_no_generator(store: tsck.Store) -> None:
    class Drawing(Loader):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            drawn()

    def drawn() -> tuple[float, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(())), float(torch.rand((), generator=noise))

    noise = torch.Generator()
    training = TrainingState(dataloader=Drawing(), extra={"noise": noise})
    training.put(store, ref="runs/job")
    expected = drawn()
    training.restore(store, "runs/job")
    assert drawn() == expected


def test_saving_changes_nothing(store: tsck.Store) -> None:
    expected = run(make(), 4)
    job = make()
    for step in range(4):
        job.training.put(store, ref="runs/job", step=step)
        job.training.put(store, ref="runs/other", step=step, gradients=True)
        job.step()
    assert run(job, 0) == expected


def test_in_the_middle_of_accumulation(store: tsck.Store) -> None:
    job = make()
    run(job, 3)
    job.accumulate()
    job.training.put(store, ref="runs/job", gradients=True)
    job.training.put(store, ref="runs/without")

    def rest(job: Job) -> object:
        job.accumulate()
        job.update()
        return run(job, STEPS)

    expected = rest(job)
    for ref in ("runs/job", "runs/without"):
        other = make(99)
        other.accumulate()  # gradients that must go
        other.training.restore(store, ref)
        assert all((each.grad is None) == (ref == "runs/without") for each in other.model.parameters())
        assert (rest(other) == expected) == (ref == "runs/job")


BITS = [np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64]


@pytest.mark.parametrize("bits", BITS)
def test_every_kind_of_generator(store: tsck.Store, bits: Any) -> None:
    def generators(number: int) -> dict[str, Any]:
        return {
            "numpy": np.random.Generator(bits(number)),
            "legacy": np.random.RandomState(bits(number)),
            "python": random.Random(number),
            "system": np.random.default_rng(number),
        }

    def drawn(found: dict[str, Any]) -> list[float]:
        return [float(found[name].normal()) for name in ("numpy", "legacy", "system")] + [found["python"].gauss()]

    first, second = generators(1), generators(2)
    drawn(first)
    TrainingState(extra=first).put(store, ref="runs/g")
    TrainingState(extra=second).restore(store, "runs/g")
    assert drawn(second) == drawn(first)


# --- what is stored -----------------------------------------------------------------------------------------------------


def test_nothing_is_copied_by_a_save_and_a_restore_fills_in_place(store: tsck.Store) -> None:
    job = make()
    run(job, 2)

    def places(job: Job) -> list[int]:
        state = job.training.captured()
        optimizer = [each for state in job.optimizer.state.values() for each in state.values()]
        assert {each.data_ptr() for one in state["optimizer"]["state"].values() for each in one.values()} == {
            each.data_ptr() for each in optimizer
        }
        tensors = [*job.model.state_dict().values(), *job.mean.state_dict().values(), *optimizer]
        assert {each.data_ptr() for each in state["model"].values()} <= {each.data_ptr() for each in tensors}
        return [each.data_ptr() for each in tensors]

    before = places(job)
    job.training.put(store, ref="runs/job")
    job.training.restore(store, "runs/job")
    assert places(job) == before


def test_names_are_those_of_torch(store: tsck.Store) -> None:
    """So that a snapshot of one process fits many ranks, and what was saved by hand looks the same."""
    job = make()
    run(job, 1)
    state = job.training.captured()
    assert state["model"].keys() == get_model_state_dict(job.model).keys()
    theirs: Any = get_optimizer_state_dict(job.model, job.optimizer)
    assert state["optimizer"]["state"].keys() == theirs["state"].keys()
    assert state["optimizer"]["param_groups"] == theirs["param_groups"]


def test_wrappers_leave_no_trace_in_names(store: tsck.Store) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def built(wrap: Callable[[nn.Module], Any]) -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
        model = wrap(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        return model, optimizer, TrainingState(model=model, optimizer=optimizer)

    def wrapped(model: Any) -> Any:
        model[0] = checkpoint_wrapper(model[0])
        return torch.compile(model, backend="eager")

    plain, _, training = built(lambda model: model)
    training.put(store, ref="runs/plain")
    other, _, same = built(wrapped)
    same.restore(store, "runs/plain")
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert list(same.captured()["optimizer"]["state"]) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    same.put(store, ref="runs/wrapped")
    assert built(lambda model: model)[2].restore(store, "runs/wrapped") is not None


def test_several_models_and_optimizers(store: tsck.Store) -> None:
    """One optimizer may train parts of several models; tied parameters have one name."""

    def built(number: int) -> tuple[Any, TrainingState]:
        seed(number)
        one, two = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear(3, 3)
        two.weight = one[0].weight  # type: ignore[assignment]
        optimizers = [torch.optim.SGD([*one.parameters(), two.bias], momentum=0.9), torch.optim.LBFGS(one[1].parameters(), max_iter=2)]
        schedulers = {"a": torch.optim.lr_scheduler.StepLR(optimizers[0], 1)}
        training = TrainingState(model={"one": one, "two": two}, optimizer=optimizers, scheduler=schedulers, extra={})

        def step() -> None:
            def loss() -> Any:
                for each in optimizers:
                    each.zero_grad()
                found = two(one(torch.randn(2, 3))).square().sum()
                found.backward()
                return found

            optimizers[1].step(loss)
            optimizers[0].step()
            schedulers["a"].step()

        return step, training

    step, training = built(0)
    for _ in range(3):
        step()
    training.put(store, ref="runs/several")
    again, other = built(1)
    other.restore(store, "runs/several")
    for number in range(2):
        seed(number)
        step()
        seed(number)
        again()
    assert "two.weight" not in training.captured()["optimizer"]["0"]["state"]
    for one, two in zip(training.captured()["model"]["one"].values(), other.captured()["model"]["one"].values(), strict=True):
        assert torch.equal(one, two)


def test_moments_keep_their_dtype(store: tsck.Store) -> None:
    """torch's own `load_state_dict` would make them bfloat16."""

    def built() -> tuple[nn.Module, torch.optim.Optimizer, TrainingState]:
        model = nn.Linear(5, 5).to(torch.bfloat16)
        optimizer = torch.optim.Adam(model.parameters())
        return model, optimizer, TrainingState(model=model, optimizer=optimizer)

    model, optimizer, training = built()
    for parameter in model.parameters():
        moments = {name: torch.randn(parameter.shape) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(3.0), **moments, "deep": {"m": [torch.full((2,), 1.001)]}}
    training.put(store, ref="runs/bf16")
    other, restored, same = built()
    same.restore(store, "runs/bf16")
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(restored.state[two]["exp_avg"], optimizer.state[one]["exp_avg"])
        (deep,) = restored.state[two]["deep"]["m"]
        assert (deep.dtype, deep.tolist()) == (torch.float32, torch.full((2,), 1.001).tolist())


def test_parameters_that_have_not_been_used(store: tsck.Store) -> None:
    """Their optimizer has no state of them, and the one that is restored has."""

    def built(used: list[int]) -> tuple[torch.optim.Optimizer, TrainingState]:
        model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)])
        optimizer = torch.optim.Adam(model.parameters())
        for number in used:
            model[number](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return optimizer, TrainingState(model=model, optimizer=optimizer)

    built([0])[1].put(store, ref="runs/used")
    for used in ([], [0, 1, 2], [1]):
        optimizer, training = built(used)
        training.restore(store, "runs/used")
        assert len(optimizer.state) == 1
        assert list(training.captured()["optimizer"]["state"]) == ["0.weight"]


def test_a_cursor_and_plain_values_are_restored(store: tsck.Store) -> None:
    """Into the dict they came in; what holds a list of it sees it, too."""

    def built() -> tuple[Any, Any, TrainingState]:
        cursor = tsck.SampleCursor(100, batch_size=10, seed=3)
        extra: dict[str, Any] = {
            "seen": 0,
            "losses": [],
            "weights": torch.zeros(3),
            "config": {"a": 1},
            "both": {"t": torch.zeros(2), "n": 0},
            "best": 3,
        }
        return cursor, extra, TrainingState(dataloader={"train": cursor}, extra=extra)

    cursor, extra, training = built()
    cursor.advance()
    extra["seen"], extra["config"]["b"], extra["both"]["n"] = 7, (1, 2), 5
    extra["losses"] += [1.0, 2.0]
    extra["best"] = None
    extra["weights"] += 1
    training.put(store, ref="runs/plain")
    again, found, other = built()
    kept = found["losses"], found["weights"], found["config"], found["both"]
    other.restore(store, "runs/plain")
    assert again.position == 10
    assert (found["seen"], found["losses"], found["config"]) == (7, [1.0, 2.0], {"a": 1, "b": (1, 2)})
    assert found["weights"].tolist() == [1, 1, 1]
    assert (found["both"]["n"], found["best"]) == (5, None)
    assert all(one is two for one, two in zip(kept, (found["losses"], found["weights"], found["config"], found["both"]), strict=True))


def test_what_there_is_to_resume_from(store: tsck.Store) -> None:
    training = TrainingState(extra={"n": 1})
    assert training.restore(store, "runs/new") is None
    first = training.put(store, ref="runs/new", step=1, metrics={"loss": 2.0}, metadata={"lr": 1})
    assert (first.metrics, store.show("runs/new").metadata) == ({"loss": 2.0}, {"lr": 1})
    training.put(store, ref="runs/new", step=2)
    assert training.restore(store, "runs/new@1") == first
    for address in ("runs/new@3", "runs/new~7", "0123456789abcdef"):
        with pytest.raises(tsck.NotFoundError):
            training.restore(store, address)
    store.mark("runs/new@1", "bad", reason="loss spike")
    with pytest.raises(tsck.SnapshotMarkedBadError):
        training.restore(store, "runs/new@1")
    assert training.restore(store, "runs/new@1", allow_marked=True) is not None


@pytest.mark.parametrize("when", ["after it was looked for", "while it is read"])
def test_a_ref_that_moves_meanwhile(store: tsck.Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    """Half of one snapshot and half of the next would be neither."""
    extra = {"n": 1, "twice": 2}
    TrainingState(extra=extra).put(store, ref="runs/job", step=1)
    restoring = store.restoring

    def move() -> None:
        with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as second:
            TrainingState(extra={"n": 2, "twice": 4}).put(second, ref="runs/job", step=2, expect=tsck.ANY)

    def moved(address: str, read: Any, **options: Any) -> Any:
        if when == "after it was looked for":
            move()

        def read_late(found: Any) -> Any:
            if when == "while it is read":
                move()
            return read(found)

        return restoring(address, read_late, **options)

    monkeypatch.setattr(store, "restoring", moved)
    found = TrainingState(extra=extra).restore(store, "runs/job")
    assert found is not None
    step = 1 if when == "while it is read" else 2
    assert (found.step, extra) == (step, {"n": step, "twice": 2 * step})


def test_a_job_that_was_given_up_for_dead_changes_nothing(store: tsck.Store, tmp_path: Path) -> None:
    """A restore is what a save then continues, as with `Store.checkout`."""
    TrainingState(extra={"n": 1}).put(store, ref="runs/job", step=1)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as second:
        successor = TrainingState(extra={"n": 0})
        successor.restore(second, "runs/job")
        successor.put(second, ref="runs/job", step=2)
    with pytest.raises(tsck.ConflictError):
        TrainingState(extra={"n": 5}).put(store, ref="runs/job", step=2)

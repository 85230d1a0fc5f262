"""Copies that go on beside the next passes: what is published is the state at the call, or nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.errors import CaptureChangedError
from tensorstore_ck.state.device.kernel import hasher_of
from tensorstore_ck.state.device.optimizer_step_gates import StepGate

REF = "runs/overlap"
WIDTH = 4096
LAYERS = 4
State = dict[str, torch.Tensor]


class Job:
    """0.8 GB of parameters and moments: the copy takes longer than the work that is queued after it."""

    def __init__(self, device: torch.device, store: tsck.Store, *, fused: bool = True) -> None:
        torch.manual_seed(0)
        self.store = store
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=device) for _ in range(LAYERS)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3, fused=fused, capturable=device.type == "cuda")
        self.training = tsck.TrainingState(model=self.model, optimizer=self.optimizer)
        self.batch = torch.randn(8, WIDTH, device=device)
        self.steps = 0
        hasher_of(self.batch.device)

    def step(self) -> None:
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1

    def values(self) -> State:
        moments = {f"{number}.{name}": each for number, state in enumerate(self.optimizer.state.values()) for name, each in state.items()}
        return {name: each.detach().clone() for name, each in {**self.model.state_dict(), **moments}.items()}

    def put(self) -> tuple[tsck.PendingSnapshot, State]:
        expected = self.values()
        return self.training.put_async(self.store, ref=REF, step=self.steps, unchanged="ok"), expected

    def stored(self, address: str) -> dict[str, Any]:
        found = self.store.checkout(address)
        states = found["optimizer"]["state"]
        names = [name for name, _ in self.model.named_parameters()]
        moments = {f"{number}.{key}": each for number, name in enumerate(names) for key, each in states[name].items()}
        return {**found["model"], **moments}


def assert_stored(job: Job, address: str, expected: State) -> None:
    found = job.stored(address)
    assert [name for name, value in expected.items() if not torch.equal(found[name].to(value.device), value)] == []


@pytest.fixture
def job(device: torch.device, store: tsck.Store) -> Job:
    """After a save that tried the optimizer out."""
    made = Job(device, store)
    made.step()
    made.put()[0].wait()
    made.step()
    return made


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The copies that steps waited for."""
    found: list[object] = []
    hold = StepGate.hold

    def noted(gate: StepGate, arrival: Any) -> None:
        found.append(arrival)
        hold(gate, arrival)

    monkeypatch.setattr(StepGate, "hold", noted)
    return found


def test_steps_right_after_the_call(cuda: torch.device, job: Job, held: list[object]) -> None:
    saves = []
    for _ in range(4):
        saves.append((job.steps, *job.put()))
        job.step()
        job.step()
    for step, pending, expected in saves:
        pending.wait()
        assert_stored(job, f"{REF}@{step}", expected)
    assert len(held) == 4


def in_place(job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.data.add_(1e-3)


def on_another_stream(job: Job) -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        in_place(job)
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("change", [in_place, on_another_stream])
def test_another_change_is_noticed(cuda: torch.device, job: Job, held: list[object], change: Callable[[Job], None]) -> None:
    torch.cuda.synchronize()
    pending, expected = job.put()
    change(job)
    try:
        pending.wait()
    except CaptureChangedError:
        assert len(job.store.log(REF)) == 1
    else:  # the copy was complete before the change
        assert_stored(job, REF, expected)
    job.step()
    pending, expected = job.put()
    job.step()
    pending.wait()
    assert_stored(job, REF, expected)


def test_replays_of_a_graph_with_the_step(cuda: torch.device, job: Job) -> None:
    for parameter in job.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.optimizer.step()
    saves = []
    for _ in range(3):
        job.steps += 1
        saves.append((job.steps, *job.put()))
        graph.replay()
    for step, pending, expected in saves:
        pending.wait()
        assert_stored(job, f"{REF}@{step}", expected)


def test_prepared_memory_serves_the_first_saves(cuda: torch.device, store: tsck.Store, held: list[object]) -> None:
    job = Job(cuda, store)
    job.step()
    job.training.prepare(store)
    for _ in range(2):
        job.step()
        pending, expected = job.put()
        job.step()
        pending.wait()
        assert_stored(job, REF, expected)
    assert len(held) == 2

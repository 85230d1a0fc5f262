"""Models in channels_last and with transposed parameters: the steps after a restore have the bits of an undisturbed run."""

from typing import Any

import pytest
import torch

import tensorstore_ck as tsck

WAYS = ("TrainingState", "asynchronously", "gradients", "load_state_dict", "into")
FUSED = {torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad}
OPTIMIZERS = [  # not LBFGS and Muon: torch's own refuse such parameters
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
]
KINDS = [(cls, kind) for cls in OPTIMIZERS for kind in ("", "foreach", "fused") if kind != "fused" or cls in FUSED]


class Model(torch.nn.Module):
    """A convolution whose kernel has two extents of 1, one that has none, and a transposed parameter."""

    def __init__(self, memory_format: torch.memory_format) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Tanh(), torch.nn.Conv2d(8, 4, 1))
        self.body.to(memory_format=memory_format)  # type: ignore[call-overload]
        self.head = torch.nn.Parameter(torch.randn(6, 4).t())

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(batch)
        return found.mean((2, 3)) @ self.head


class Job:
    def __init__(self, cls: Any, kind: str, memory_format: torch.memory_format = torch.channels_last) -> None:
        self.memory_format = memory_format
        self.model = Model(memory_format)
        options = {"momentum": 0.9} if cls is torch.optim.SGD else {}
        self.optimizer = cls(self.model.parameters(), lr=1e-2, **options, **({kind: True} if kind else {}))
        self.training = tsck.TrainingState(model=self.model, optimizer=self.optimizer)

    def backward(self, step: int, part: int) -> torch.Tensor:
        batch = torch.randn(2, 3, 7, 7, generator=torch.Generator().manual_seed(2 * step + part)).to(memory_format=self.memory_format)
        loss: torch.Tensor = self.model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    def run(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.backward(step, 0)
            self.finish(step)

    def finish(self, step: int) -> None:
        self.optimizer.step(lambda: self.backward(step, 1))
        self.optimizer.zero_grad()

    def parameters(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def resumed(store: tsck.Store, job: Job, other: Job, way: str) -> None:
    """`other` takes over from `job`."""
    state = {"model": job.model.state_dict(), "optimizer": job.optimizer.state_dict()}
    if way in ("TrainingState", "gradients"):
        job.training.put(store, ref=way, gradients=way == "gradients")
        other.training.restore(store, way)
    elif way == "asynchronously":
        job.training.put_async(store, ref=way).wait()
        other.training.restore(store, way)
    else:
        store.put_snapshot(state, ref=way)
        if way == "into":
            other.run(50, 51)
            found = {"model": other.model.state_dict(), "optimizer": other.optimizer.state_dict()}
            store.checkout(way, into=found)
        else:
            found = store.checkout(way)
        other.model.load_state_dict(found["model"])
        other.optimizer.load_state_dict(found["optimizer"])


def require_exact(store: tsck.Store, cls: Any, kind: str, way: str) -> None:
    undisturbed, job, other = (Job(cls, kind) for _ in range(3))
    undisturbed.run(0, 6)
    job.run(0, 3)
    if way == "gradients":
        job.backward(3, 0)
    resumed(store, job, other, way)
    if way == "gradients":
        other.finish(3)
    other.run(4 if way == "gradients" else 3, 6)
    for one, two in zip(undisturbed.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two), (cls, kind, way)


@pytest.mark.parametrize("way", WAYS)
def test_fused(store: tsck.Store, way: str) -> None:
    require_exact(store, torch.optim.AdamW, "fused", way)


@pytest.mark.slow
@pytest.mark.parametrize(("cls", "kind"), KINDS)
def test_every_optimizer(store: tsck.Store, cls: Any, kind: str) -> None:
    for way in WAYS:
        require_exact(store, cls, kind, way)


def test_the_target_decides(store: tsck.Store) -> None:
    """Moments get the strides of the parameter that they belong to, whatever those of the run that saved were."""
    for before, after in ((torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)):
        job, other = Job(torch.optim.AdamW, "fused", before), Job(torch.optim.AdamW, "fused", after)
        job.run(0, 2)
        job.backward(2, 0)
        job.training.put(store, ref=str(after), gradients=True)
        other.training.restore(store, str(after))
        for one, two in zip(job.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one, two)
            assert two.grad is not None
            assert two.grad.stride() == two.stride()
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(job.optimizer.state[one][name], other.optimizer.state[two][name])
                assert other.optimizer.state[two][name].stride() == two.stride()

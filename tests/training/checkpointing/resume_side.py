"""What each rank of the pool does in the tests of `Checkpointer.resume`."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.training import resume_search
from tests.end_to_end.crash.faulty import Faults, FaultyBackend
from tests.session.group.pool import GROUPS, TIMEOUT_SECONDS


class Counter:
    """Takes its state, or does not."""

    def __init__(self) -> None:
        self.n = 0
        self.takes = True

    def state_dict(self) -> dict[str, int]:
        return {"n": self.n}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if not self.takes:
            raise KeyError("n")
        self.n = state["n"]


class Job:
    def __init__(self, kind: str, width: int = 500) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(width, 4)
        self.counter = Counter()
        self.state: Any = {"model": self.model.state_dict(), "step": torch.zeros(1)}
        if kind != "plain":
            self.state = tsck.TrainingState(model=self.model, dataloader=self.counter)

    def go_to(self, step: int, more: float = 0.0) -> None:
        self.counter.n = step
        with torch.no_grad():
            self.model.weight.fill_(step + more)

    @property
    def at(self) -> float:
        return float(self.model.weight.detach().mean())


def put(folder: str, kind: str, ranks: int, steps: list[float]) -> None:
    """A run that saves at each of the steps 1, 2 ..; `steps`: what rank 1 has instead of what all have, added."""
    job, rank = Job(kind), dist.get_rank()
    with warnings.catch_warnings(), tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", codec="raw") as store:
        warnings.simplefilter("ignore")
        ckpt = tsck.Checkpointer(store, job.state, ref="job", when=tsck.every_steps(1), group=GROUPS[ranks], asynchronous=False)
        for step, more in enumerate(steps, start=1):
            job.go_to(step, more if rank == 1 else 0.0)
            ckpt.step(step)


def resume(folder: str, kind: str, ranks: int, trouble: str, drift: Any = None) -> tuple[int | None, float, list[str]]:
    """The step, what the weights are, and what was warned of; `trouble` is on rank 1."""
    rank = dist.get_rank()
    job = Job(kind, width=300 if trouble == "another model" and rank == 1 else 500)
    job.counter.takes = not (trouble == "a state that is not taken" and rank == 1)
    faults = Faults()
    with (
        warnings.catch_warnings(record=True) as caught,
        pytest.MonkeyPatch.context() as patch,
        tsck.open(f"{folder}/store", cache_dir=f"{folder}/again-{rank}") as store,
    ):
        warnings.simplefilter("always")
        patch.setattr(resume_search, "PAUSE_SECONDS", 0.0)
        store.engine.backend = FaultyBackend(store.engine.backend, faults, atomic_put=False)
        ckpt = tsck.Checkpointer(
            store, job.state, ref="job", when=tsck.every_steps(1), group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS
        )
        if rank == 1:
            if "away" in trouble:
                faults.mode, faults.at, faults.persistent = "unavailable", faults.calls + 1, "for good" in trouble
            if trouble == "damage":
                read_into = LocalBackend.read_into

                def damaged(self: LocalBackend, name: str, offset: int, target: memoryview) -> None:
                    read_into(self, name, offset, target)
                    if name in newest:
                        target[len(target) // 2] ^= 1

                newest = set(store.show("job").packs) - set(store.show("job~1").packs)
                newest = {f"packs/{each[-2:]}/{each}" for each in newest} | newest
                patch.setattr(LocalBackend, "read_into", damaged)
        if kind == "TrainingState alone":
            found = job.state.restore(store, "job", group=GROUPS[ranks], timeout_seconds=TIMEOUT_SECONDS)
        else:
            found = ckpt.resume(drift=drift)
    return None if found is None else found.step, job.at, [str(each.message) for each in caught]


def restore_with_broadcast(folder: str, kind: str, ranks: int) -> tuple[str, float]:
    """Rank 1's model is another one; then all have the same."""
    rank = dist.get_rank()
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/again-{rank}") as store:
        options: Any = {"group": GROUPS[ranks], "broadcast": True, "timeout_seconds": TIMEOUT_SECONDS}
        error = ""
        for width in (300 if rank == 1 else 500, 500):
            job = Job(kind, width)
            try:
                if kind == "TrainingState":
                    job.state.restore(store, "job", **options)
                else:
                    store.checkout("job", into=job.state, **options)
            except tsck.StoreError as exc:
                error = str(exc)
        return error, job.at

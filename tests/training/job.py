"""A small job that depends on everything that can be captured: each of its numbers comes from several generators and positions."""

import random
from typing import Any

import numpy as np
import torch
from torch import nn

from tensorstore_ck.training import TrainingState
from tensorstore_ck.training.verify_resume import copied, leaves_of

SAMPLES = 41
BATCH = 4


class Loader:
    """Shuffles, and augments at random."""

    def __init__(self) -> None:
        self._shuffle = torch.Generator().manual_seed(7)
        self._order = torch.randperm(SAMPLES, generator=self._shuffle)
        self._position = 0

    def next_batch(self) -> torch.Tensor:
        if self._position + BATCH > SAMPLES:
            self._order = torch.randperm(SAMPLES, generator=self._shuffle)
            self._position = 0
        chosen = self._order[self._position : self._position + BATCH]
        self._position += BATCH
        batch = chosen[:, None] / SAMPLES * torch.linspace(-1, 1, 6)
        if random.random() < 0.5:
            batch = batch.flip(1)
        return batch + 0.1 * torch.randn(batch.shape) + 0.1 * float(np.random.normal())

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order, "position": self._position, "shuffle": self._shuffle.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order, self._position = state["order"], state["position"]
        self._shuffle.set_state(state["shuffle"])


class Job:
    """`leave_out`: what its `TrainingState` does not get."""

    def __init__(self, *leave_out: str, width: int = 16) -> None:
        self.model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=0.05, total_steps=60)
        self.scaler = torch.amp.GradScaler(device="cpu", init_scale=1024.0, growth_interval=3)
        self.loader = Loader()
        self.mean = torch.optim.swa_utils.AveragedModel(self.model)
        self.extra: dict[str, Any] = {
            "mean": self.mean,
            "losses": [],
            "seen": 0,
            "noise": torch.Generator().manual_seed(1),
            "drawn": np.random.default_rng(2),
        }
        self.training = TrainingState(**{name: part for name, part in parts(self).items() if name not in leave_out})

    def accumulate(self) -> Any:
        """A micro-batch."""
        batch = self.loader.next_batch()
        batch = batch + 0.1 * torch.randn(batch.shape, generator=self.extra["noise"]) * float(self.extra["drawn"].random())
        loss = self.model(batch).square().mean()
        self.scaler.scale(loss).backward()
        self.extra["seen"] += BATCH
        self.extra["losses"].append(loss.item())
        return self.extra["losses"][-1]

    def update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.mean.update_parameters(self.model)
        self.optimizer.zero_grad()

    def step(self) -> Any:
        loss = self.accumulate() + self.accumulate()
        self.update()
        return loss


def seed(number: int) -> None:
    """What a process begins with."""
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def make(number: int = 0) -> Job:
    seed(number)
    return Job()


def run(job: Job, steps: int) -> dict[str, object]:
    """All that the steps leave, to the bit; the losses are among it."""
    for _ in range(steps):
        job.step()
    found = copied(leaves_of(TrainingState(**parts(job)).captured()))
    return {path: leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in found.items()}


def parts(job: Job) -> dict[str, Any]:
    return {
        "model": job.model,
        "optimizer": job.optimizer,
        "scheduler": job.scheduler,
        "scaler": job.scaler,
        "dataloader": job.loader,
        "extra": job.extra,
    }

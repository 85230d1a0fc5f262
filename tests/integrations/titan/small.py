"""A manager of a small model, without torchtitan's Trainer; and a training loop for it."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

import tensorstore_ck as tsck
from tests.integrations.titan.runs import REF


class Progress:
    """In place of the Trainer, which saves its counters."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class Job:
    """A run: model, optimizer, schedule, counters and manager."""

    def __init__(self, folder: Path, *, width: int = 4, sd_adapter: Any = None, **options: Any) -> None:
        torch.manual_seed(5)
        self.model = nn.Linear(width, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.progress = Progress()
        config = {"store": str(folder / "store"), "ref": REF, "interval": 1, "keep_latest_k": 0, **options}
        self.manager = tsck.titan.SnapshotManager.Config(**config).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=[self.optimizer],
            lr_schedulers=self.scheduler,
            states={"train_state": self.progress},
            sd_adapter=sd_adapter,
            base_folder=str(folder / "out"),
        )

    def __enter__(self) -> "Job":
        return self

    def __exit__(self, *_: object) -> None:
        self.manager.close()

    def train(self, steps: int, *, ends: bool = False) -> list[int]:
        """Up to this step; `ends`: it is the last one. The steps that were saved."""
        saved = []
        while self.progress.step < steps:
            self.progress.step += 1
            self.model(torch.rand(2, self.model.in_features)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            if self.manager.save(self.progress.step, last_step=ends and self.progress.step == steps):
                saved.append(self.progress.step)
        return saved

    @property
    def weights(self) -> torch.Tensor:
        return self.model.weight.detach().clone()


def saved_steps(folder: Path) -> list[int | None]:
    """Of the ref, newest first."""
    with tsck.open(folder / "store", read_only=True) as store:
        return [snapshot.step for snapshot in store.log(REF)]

"""`lightning.SnapshotCheckpoint` and a Fabric keep what every adapter promises."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

import tensorstore_ck as tsck
from tests.integrations.conformance import AdapterConformance, Trained
from tests.integrations.lightning import runs
from tests.integrations.lightning.conftest import QUIET

pytestmark = [pytest.mark.slow, *QUIET]
WIDTH = 256


class _From(Callback):  # type: ignore[misc]
    """Notes the step from which a run goes on."""

    resumed_at: int | None = None

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self.resumed_at = trainer.global_step or None


class TestTrainer(AdapterConformance):
    ref = runs.REF
    continuing = 'ckpt_path="last"'

    def train(self, folder: Path, store: tsck.Store, steps: int, *, resume: str | bool) -> Trained:
        noted = _From()
        saves = runs.checkpoint(folder, store, every_n_train_steps=1, asynchronous=False)
        trainer = runs.trainer(folder, noted, saves, max_steps=steps, max_epochs=-1)
        newest = "last" if resume is True and self.ref in store.branches() else None
        trainer.fit(runs.seeded(width=WIDTH), ckpt_path=resume if isinstance(resume, str) else newest)
        return Trained(noted.resumed_at, runs.weights(trainer.lightning_module))


class TestFabric(AdapterConformance):
    continuing = r"fabric\.load"

    def train(self, folder: Path, store: tsck.Store, steps: int, *, resume: str | bool) -> Trained:
        fabric = lightning.Fabric(accelerator="cpu", devices=1)
        tsck.lightning.attach(fabric, store=store, ref=self.ref)
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
        state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
        address = self.ref if resume is True else resume
        if address and (resume is not True or self.ref in store.branches()):
            fabric.load(address, state)
        begun = state["step"]
        for step in range(begun + 1, steps + 1):
            fabric.backward(model(torch.randn(8, 64)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            fabric.save(folder / f"step-{step}.ckpt", state)
        return Trained(begun or None, model.state_dict())

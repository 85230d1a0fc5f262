"""`AdapterConformance` with a loop of one's own and a `Checkpointer`: what CONTRIBUTING.md shows."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tensorstore_ck as tsck
from tensorstore_ck.integrations.trainer.saves import require_own_ref
from tests.integrations.conformance import AdapterConformance, Trained

pytestmark = pytest.mark.slow


class TestALoop(AdapterConformance):
    continuing = "pass resume=True to continue it"

    def train(self, folder: Path, store: tsck.Store, steps: int, *, resume: str | bool) -> Trained:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.3), nn.Linear(64, 1))
        optimizer = torch.optim.AdamW(model.parameters())
        training = tsck.TrainingState(model=model, optimizer=optimizer)
        address = self.ref if resume is True else resume
        resumed = training.restore(store, address) if address else None
        begun = (resumed.step or 0) if resumed else 0
        if not resume:
            require_own_ref(store, self.ref, "resume=True")
        for step in range(begun + 1, steps + 1):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            training.put(store, ref=self.ref, step=step)
        return Trained(begun or None, model.state_dict())

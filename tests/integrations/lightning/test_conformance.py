"""`lightning.SnapshotCheckpoint` keeps what every adapter promises."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

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


class TestConformance(AdapterConformance):
    ref = runs.REF
    continuing = 'ckpt_path="last"'

    def train(self, folder: Path, store: tsck.Store, steps: int, *, resume: str | bool) -> Trained:
        noted = _From()
        saves = runs.checkpoint(folder, store, every_n_train_steps=1, asynchronous=False)
        trainer = runs.trainer(folder, noted, saves, max_steps=steps, max_epochs=-1)
        newest = "last" if resume is True and self.ref in store.branches() else None
        trainer.fit(runs.seeded(width=WIDTH), ckpt_path=resume if isinstance(resume, str) else newest)
        return Trained(noted.resumed_at, runs.weights(trainer.lightning_module))

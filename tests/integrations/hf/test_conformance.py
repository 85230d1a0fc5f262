"""`hf.Trainer` keeps what every adapter promises."""

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import tensorstore_ck as tsck
from tests.integrations.conformance import STEPS, AdapterConformance, Trained
from tests.integrations.hf import runs

pytestmark = pytest.mark.slow


class _From(TrainerCallback):  # type: ignore[misc]
    """Notes the step from which a run goes on, and ends it after another one."""

    def __init__(self, last: int) -> None:
        self.resumed_at: int | None = None
        self._last = last

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.resumed_at = state.global_step or None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self._last


class TestConformance(AdapterConformance):
    ref = runs.REF
    continuing = 'pass resume_from_checkpoint="auto" to continue it'

    def train(self, folder: Path, store: tsck.Store, steps: int, *, resume: str | bool) -> Trained:
        trainer = runs.over_store(folder, store, asynchronous=False, max_steps=STEPS, save_steps=1)
        noted = _From(steps)
        trainer.add_callback(noted)
        trainer.train(resume_from_checkpoint="auto" if resume is True else resume or None)
        return Trained(noted.resumed_at, runs.weights(trainer))

"""Ends of epochs, and data without a length: a resumed run repeats and leaves out nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tests.integrations.hf import runs

pytestmark = pytest.mark.slow


class KillAtEpochEnd(runs.KillAfter):
    """Ends a run after a step, when its epoch ends."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Goes on."""

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_step_end(args, state, control)


class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
    """Five batches of two, without a length."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return (runs.Sentences()[number] for number in range(9))


@pytest.mark.parametrize("killed_at", ["end of an epoch", "next step"])
def test_what_is_due_at_the_end_of_an_epoch_is_in_the_save_of_its_last_step(tmp_path: Path, store: tsck.Store, killed_at: str) -> None:
    """A log, and an evaluation that the schedule waits for."""
    options: dict[str, Any] = {"eval_strategy": "epoch", "logging_strategy": "epoch", "save_steps": 5, "max_steps": 30}
    options |= {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 0, "mode": "max"}}
    options |= {"metric_for_best_model": "loss"}
    whole = runs.native(tmp_path / "native", **options)
    whole.train()
    kill = KillAtEpochEnd(20) if killed_at == "end of an epoch" else runs.KillAfter(21)
    parts = runs.parts(tmp_path / "out", **options)
    with pytest.raises(runs.Killed):
        hf.Trainer(**parts, callbacks=[kill], store=store, ref=runs.REF, on_exception=False).train()
    store.drain()
    resumed = runs.over_store(tmp_path / "out", store, **options)
    resumed.train(resume_from_checkpoint=True)
    assert runs.losses(resumed) == runs.losses(whole)
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == [10, 20, 30]
    runs.assert_equal(runs.weights(resumed), runs.weights(whole))


@pytest.mark.parametrize(("saved", "micro_batches"), [(2, 2), (3, 2), (7, 1), (10, 1)])
def test_a_resume_in_a_later_pass_over_a_stream(tmp_path: Path, store: tsck.Store, saved: int, micro_batches: int) -> None:
    """Also behind the last step of a pass, which has another micro-batch or none."""
    options: dict[str, Any] = {"gradient_accumulation_steps": micro_batches, "save_steps": 1, "logging_steps": 1}
    whole = runs.native(tmp_path / "native", **options)
    whole.train_dataset = Stream()
    whole.train()
    killed = runs.over_store(tmp_path / "out", store, kill_after=saved + 1, **options)
    killed.train_dataset = Stream()
    with pytest.raises(runs.Killed):
        killed.train()
    store.drain()
    resumed = runs.over_store(tmp_path / "out", store, **options)
    resumed.train_dataset = Stream()
    resumed.train(resume_from_checkpoint=True)
    assert runs.losses(resumed) == runs.losses(whole)
    assert [entry["epoch"] for entry in resumed.state.log_history] == [entry["epoch"] for entry in whole.state.log_history]
    runs.assert_equal(runs.weights(resumed), runs.weights(whole))

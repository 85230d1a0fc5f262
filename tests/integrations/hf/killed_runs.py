"""Runs of transformers' Trainer in forked processes, which a call of the backend can kill with -9."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import TrainerCallback

from tensorstore_ck import Store
from tensorstore_ck.integrations import hf
from tests.integrations.hf import runs
from tests.integrations.kill_at import KillAt, forked, open_killable

STRUCK_STEP = 8
"""Kills strike in the saves of this step and of the last one; that of step 4 is whole."""


class Ended(NamedTuple):
    """How a run that nothing killed ended."""

    calls: int
    """Of the backend, since the end of the struck step."""
    samples: list[int]
    """In the order in which the run read them."""
    losses: list[list[float]]
    digests: dict[str, str]
    """Of the weights, moments, schedule and generators that the last snapshot has."""


class _Count(TrainerCallback):  # type: ignore[misc]
    """Counts calls from the end of the struck step on, before its save; and when the save before it has ended."""

    def __init__(self, faults: KillAt, store: Store) -> None:
        self._faults, self._store = faults, store

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STRUCK_STEP:
            self._store.drain()
        self._faults.is_counting = state.global_step >= STRUCK_STEP


class _Noted(runs.Sentences):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.read.append(number)
        return super().__getitem__(number)


def _digest(value: object) -> str:
    def plain(each: object) -> object:
        if isinstance(each, torch.Tensor):
            return hashlib.sha256(each.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        return repr(each)

    return hashlib.sha256(json.dumps(value, default=plain, sort_keys=True).encode()).hexdigest()


def _train(folder: Path, faults: KillAt, *, resume: bool) -> Ended:
    with open_killable(folder / "store", faults) as store:
        data = _Noted()
        given = runs.parts(folder / "out", save_steps=4, logging_steps=3) | {"train_dataset": data}
        trainer = hf.Trainer(**given, callbacks=[_Count(faults, store)], store=store, ref=runs.REF)
        trainer.train(resume_from_checkpoint=resume)
        calls, state = faults.calls, store.checkout(runs.REF)
        parts = {name: state[name] for name in ("model", "optimizer", "scheduler")} | {"generators": state["rank"]["generators"]}
        losses = [list(each) for each in runs.losses(trainer)]
        return Ended(calls, data.read, losses, {name: _digest(part) for name, part in parts.items()})


def run(folder: Path, *, at: int = 0, torn: bool = False, resume: bool = False) -> Ended | None:
    """A run in a process of its own; None if it was killed, at call `at`."""
    return forked(lambda: _train(folder, KillAt(at, torn=torn), resume=resume), folder)

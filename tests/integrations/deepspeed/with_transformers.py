"""transformers' Trainer with DeepSpeed on ranks; for trainers_job and kills_job."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from transformers import TrainerCallback

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tensorstore_ck.store import Store
from tests.integrations.deepspeed import accelerate_on_cpu  # noqa: F401
from tests.integrations.deepspeed.engines import Kind
from tests.integrations.deepspeed.stages_job import differing
from tests.integrations.hf import runs
from tests.integrations.kill_at import KillAt
from tests.integrations.rank_runs import say

SAVED_AFTER, CUT_AFTER = 4, 6
STRUCK, STEPS = 8, 10
SAVED_NAME = "checkpoint-4"
LONG = 8
"""Steps of a run of transformers' own Trainer."""


def given(kind: Kind, folder: Path, **options: Any) -> dict[str, Any]:
    """The arguments of a Trainer."""
    for each in (AcceleratorState, GradientState):
        each._reset_state()
    config = {
        "zero_optimization": {"stage": kind.stage, **dict(kind.options)},
        "bf16": {"enabled": kind.dtype == "bf16"},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 1.0,
        "zero_force_ds_cpu_optimizer": False,
    }
    return runs.parts(folder, use_cpu=False, bf16=kind.dtype == "bf16", deepspeed=config, logging_steps=1, **options)


def make(kind: Kind, folder: Path, store: Store, ref: str, *callbacks: TrainerCallback, **options: Any) -> hf.Trainer:
    return hf.Trainer(**given(kind, folder, **options), callbacks=[*callbacks], store=store, ref=ref, asynchronous=False)


def train(kind: Kind, folder: Path, store: Store) -> None:
    """The run that is cut ends after 6 steps, of which the first 4 are saved."""
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 4}
    whole = make(kind, folder / kind.ref / "whole", store, f"{kind.ref}/whole", **best)
    whole.train()
    with suppress(runs.Killed):
        make(kind, folder / kind.ref / "out", store, kind.ref, runs.KillAfter(CUT_AFTER), **best).train()
    resumed = make(kind, folder / kind.ref / "out", store, kind.ref, **best)
    resumed.train(resume_from_checkpoint=True)
    folders = sorted(each.name for each in (folder / kind.ref / "out").iterdir())
    drawn = torch.rand(()).item()
    say(
        kind=kind.ref,
        whole=runs.losses(whole),
        losses=runs.losses(resumed),
        drawn=drawn,
        folders=folders,
        best=resumed.state.best_global_step,
    )


def load(kind: Kind, folder: Path, store: Store, ref: str) -> None:
    """At step 4, without a step."""
    copy = f"{os.environ['WORLD_SIZE']}-ranks/{kind.ref}/{ref}"
    trainer = make(kind, folder / copy, store, "runs/other", max_steps=SAVED_AFTER)
    trainer.train(resume_from_checkpoint=f"{ref}@{SAVED_AFTER}")
    engine: Any = trainer.deepspeed
    tsck.deepspeed.attach(engine, store, ref=copy, asynchronous=False)
    engine.save_checkpoint(folder / copy / "engine")
    say(kind=kind.ref, ref=ref, step=trainer.state.global_step, **differing(store, f"{ref}@{SAVED_AFTER}", copy))


def save_natively(kind: Kind, folder: Path, store: Store) -> Path:
    """A run of transformers' own Trainer, and one over the store; returns the folder that the first wrote after 4 steps."""
    transformers.Trainer(**given(kind, folder / kind.ref / "native", max_steps=LONG)).train()
    make(kind, folder / kind.ref / "light", store, kind.ref, max_steps=LONG).train()
    return folder / kind.ref / "native" / f"checkpoint-{SAVED_AFTER}"


def resume_natively(kind: Kind, folder: Path, native: Path) -> tuple[Any, Any]:
    """From a folder of transformers; returns the engine, and what was logged."""
    trainer = transformers.Trainer(**given(kind, folder, max_steps=LONG))
    trainer.train(resume_from_checkpoint=str(native))
    return trainer.deepspeed, runs.losses(trainer)


def resume_imported(kind: Kind, folder: Path, store: Store, ref: str) -> tuple[Any, Any]:
    """From an imported snapshot; as `resume_natively`."""
    trainer = make(kind, folder, store, f"{ref}/on", max_steps=LONG)
    trainer.train(resume_from_checkpoint=f"{ref}@{SAVED_AFTER}")
    return trainer.deepspeed, runs.losses(trainer)


class _Struck(TrainerCallback):  # type: ignore[misc]
    """Counts calls in one save; notes losses."""

    def __init__(self, faults: KillAt) -> None:
        self._faults = faults
        self.losses: dict[int, list[float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._faults.is_counting = state.global_step == STRUCK

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._faults.is_counting = False

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses[state.global_step] = [logs["loss"], logs["grad_norm"]]


def train_struck(kind: Kind, folder: Path, store: Store, faults: KillAt) -> dict[int, Any]:
    """From the newest snapshot on; the calls in the save after step 8 are counted. Returns losses and norms by the number of steps."""
    struck = _Struck(faults)
    make(kind, folder, store, "runs/a", struck, max_steps=STEPS).train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    return struck.losses

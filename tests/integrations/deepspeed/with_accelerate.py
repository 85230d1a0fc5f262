"""A loop with an `Accelerator` and DeepSpeed on ranks; for trainers_job and kills_job.

With the option ``dummy=true`` DeepSpeed makes the optimizer and the schedule from its configuration.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin

import tensorstore_ck as tsck
from tensorstore_ck.store import Store
from tests.integrations.accelerate import runs
from tests.integrations.deepspeed import accelerate_on_cpu  # noqa: F401
from tests.integrations.deepspeed.engines import Kind
from tests.integrations.deepspeed.stages_job import differing
from tests.integrations.kill_at import KillAt
from tests.integrations.rank_runs import say

BATCHES = 5
"""Of an epoch, on two ranks. A save comes after each third step."""
STRUCK, CUT_AFTER = 6, 7
SAVED_NAME = "checkpoint_1"
SAVE = 1
"""The number of the save after step 6."""


def plugin(kind: Kind) -> DeepSpeedPlugin:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": kind.stage},
        "bf16": {"enabled": kind.dtype == "bf16"},
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
    if kind.options:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}}
    return DeepSpeedPlugin(hf_ds_config=config)


def run(kind: Kind, folder: Path, store: Store | None, ref: str, **options: Any) -> runs.Run:
    return runs.train(folder, store, ref=ref, deepspeed=plugin(kind), attach={"asynchronous": False}, **options)


def train(kind: Kind, folder: Path, store: Store) -> None:
    """The run that is cut ends after 7 steps, of which the first 6 are saved."""
    whole = run(kind, folder / kind.ref / "whole", store, f"{kind.ref}/whole", resume=False)
    drawn = torch.rand(()).item()
    with suppress(runs.Killed):
        run(kind, folder / kind.ref / "out", store, kind.ref, resume=False, kill_after=CUT_AFTER)
    resumed = run(kind, folder / kind.ref / "out", store, kind.ref)
    is_same = (drawn, whole.average, whole.iteration) == (torch.rand(()).item(), resumed.average, resumed.iteration)
    folders = sorted(each.name for each in (folder / kind.ref / "out" / "checkpoints").iterdir())
    compared = differing(store, f"{kind.ref}/whole", kind.ref)
    say(
        kind=kind.ref,
        whole=[whole.batches, whole.losses],
        losses=[resumed.batches, resumed.losses],
        same=is_same,
        folders=folders,
        **compared,
    )


def load(kind: Kind, folder: Path, store: Store, ref: str) -> None:
    """After step 6, without a step."""
    copy = f"{os.environ['WORLD_SIZE']}-ranks/{kind.ref}/{ref}"
    engines: list[Any] = []

    def stop(engine: Any) -> None:
        engines.append(engine)
        raise runs.Killed

    with suppress(runs.Killed):
        run(kind, folder / copy, store, "runs/other", resume=f"{ref}@{SAVE}", on_loaded_model=stop)
    (engine,) = engines
    tsck.deepspeed.attach(engine, store, ref=copy, asynchronous=False)
    engine.save_checkpoint(folder / copy / "engine")
    say(kind=kind.ref, ref=ref, step=engine.global_steps, **differing(store, f"{ref}@{SAVE}", copy))


def save_natively(kind: Kind, folder: Path, store: Store) -> Path:
    """A run of accelerate's own Accelerator, and one over the store; returns the folder that the first wrote after 6 steps."""
    for place, used in (("native", None), ("light", store)):
        with suppress(runs.Killed):
            run(kind, folder / kind.ref / place, used, kind.ref, resume=False, kill_after=CUT_AFTER)
    return folder / kind.ref / "native" / "checkpoints" / f"checkpoint_{SAVE}"


def resume_natively(kind: Kind, folder: Path, native: Path) -> tuple[Any, Any]:
    """From a folder of accelerate; returns the engine, and what the run did."""
    return _resume(kind, folder, None, "", str(native))


def resume_imported(kind: Kind, folder: Path, store: Store, ref: str) -> tuple[Any, Any]:
    """From an imported snapshot; as `resume_natively`."""
    return _resume(kind, folder, store, f"{ref}/on", f"{ref}@{SAVE}")


def _resume(kind: Kind, folder: Path, store: Store | None, ref: str, resume: str) -> tuple[Any, Any]:
    engines: list[Any] = []
    found = run(kind, folder, store, ref, resume=resume, on_loaded_model=engines.append)
    return engines[0], [found.batches, found.losses, found.average]


def train_struck(kind: Kind, folder: Path, store: Store, faults: KillAt) -> dict[int, Any]:
    """From the newest snapshot on; the calls in the save after step 6 are counted. Returns batches and losses by the number of steps."""

    def strike(step: int) -> None:
        faults.is_counting = step == STRUCK - 1

    resume = None if (folder / "checkpoints").exists() else False
    found = run(kind, folder, store, "runs/a", resume=resume, on_step=strike)
    first = runs.EPOCHS * BATCHES - len(found.losses) + 1
    return dict(enumerate(zip(found.batches, found.losses, strict=True), first))

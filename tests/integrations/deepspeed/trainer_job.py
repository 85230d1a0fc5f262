"""transformers' Trainer with DeepSpeed under torchrun: ``trainer_job FOLDER train|load KIND...``; a kind is as in stages_job.

``train``: for each kind a run that nothing disturbs, and one that ends after 6 steps and is resumed. ``load``: each kind resumes the
snapshots of all kinds at step 4 without a step; the engine then saves itself as it is. Each rank says what it did in lines of JSON.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tensorstore_ck.store import Store
from tests.integrations.deepspeed import accelerate_on_cpu  # noqa: F401
from tests.integrations.deepspeed.engines import Kind, join
from tests.integrations.deepspeed.stages_job import differing, parse
from tests.integrations.hf import runs
from tests.integrations.rank_runs import say

SAVED_AFTER, CUT_AFTER = 4, 6


def make(kind: Kind, folder: Path, store: Store, ref: str, *, kill_after: int | None = None, **options: Any) -> hf.Trainer:
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
    given = runs.parts(folder, use_cpu=False, bf16=kind.dtype == "bf16", deepspeed=config, logging_steps=1, **options)
    callbacks = [] if kill_after is None else [runs.KillAfter(kill_after)]
    return hf.Trainer(**given, callbacks=callbacks, store=store, ref=ref, asynchronous=False)


def train(kind: Kind, folder: Path, store: Store) -> None:
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 4}
    whole = make(kind, folder / kind.ref / "whole", store, f"{kind.ref}/whole", **best)
    whole.train()
    with suppress(runs.Killed):
        make(kind, folder / kind.ref / "out", store, kind.ref, kill_after=CUT_AFTER, **best).train()
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
    copy = f"{os.environ['WORLD_SIZE']}-ranks/{kind.ref}/{ref}"
    trainer = make(kind, folder / copy, store, "runs/other", max_steps=SAVED_AFTER)
    trainer.train(resume_from_checkpoint=f"{ref}@{SAVED_AFTER}")
    engine: Any = trainer.deepspeed
    tsck.deepspeed.attach(engine, store, ref=copy, asynchronous=False)
    engine.save_checkpoint(folder / copy / "engine")
    say(kind=kind.ref, ref=ref, step=trainer.state.global_step, **differing(store, f"{ref}@{SAVED_AFTER}", copy))


def main(folder: Path, what: str, kinds: list[Kind]) -> None:
    rank = join()
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{rank}") as store:
        saved = [name for name in store.branches() if name.startswith("runs/") and not name.endswith("/whole")]
        for kind in kinds:
            if what == "train":
                train(kind, folder, store)
                continue
            for ref in (each for each in sorted(saved) if each.startswith(f"runs/{kind.dtype}-")):
                load(kind, folder, store, ref)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], [parse(each) for each in sys.argv[3:]])

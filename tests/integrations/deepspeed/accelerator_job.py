"""A loop with an `Accelerator` and DeepSpeed under torchrun: ``accelerator_job FOLDER train|load KIND...``; see trainer_job.

With the option ``dummy=true`` DeepSpeed makes the optimizer and the schedule from its configuration.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DeepSpeedPlugin

import tensorstore_ck as tsck
from tensorstore_ck.store import Store
from tests.integrations.accelerate import runs
from tests.integrations.deepspeed import accelerate_on_cpu  # noqa: F401
from tests.integrations.deepspeed.engines import Kind, join
from tests.integrations.deepspeed.stages_job import differing, parse
from tests.integrations.rank_runs import say

CUT_AFTER = 7
"""A save comes after each third step; on two ranks an epoch has 5."""
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


def train(kind: Kind, folder: Path, store: Store) -> None:
    def run(name: str, ref: str, **options: Any) -> runs.Run:
        return runs.train(folder / kind.ref / name, store, ref=ref, deepspeed=plugin(kind), attach={"asynchronous": False}, **options)

    whole = run("whole", f"{kind.ref}/whole", resume=False)
    drawn = torch.rand(()).item()
    with suppress(runs.Killed):
        run("out", kind.ref, resume=False, kill_after=CUT_AFTER)
    resumed = run("out", kind.ref)
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
    copy = f"{os.environ['WORLD_SIZE']}-ranks/{kind.ref}/{ref}"
    engines: list[Any] = []

    def stop(engine: Any) -> None:
        engines.append(engine)
        raise runs.Killed

    with suppress(runs.Killed):
        runs.train(folder / copy, store, resume=f"{ref}@{SAVE}", ref="runs/other", deepspeed=plugin(kind), on_loaded_model=stop)
    (engine,) = engines
    tsck.deepspeed.attach(engine, store, ref=copy, asynchronous=False)
    engine.save_checkpoint(folder / copy / "engine")
    say(kind=kind.ref, ref=ref, step=engine.global_steps, **differing(store, f"{ref}@{SAVE}", copy))


def main(folder: Path, what: str, kinds: list[Kind]) -> None:
    rank = join()
    PartialState.destroy_process_group = lambda *_: None  # `end_training` calls it, and this process has more runs
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

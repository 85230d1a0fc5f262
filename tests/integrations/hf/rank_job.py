"""A run of transformers' Trainer under torchrun: ``rank_job FOLDER REF [RESUME]``. Says each step, and at the end its losses."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tests.integrations.hf import runs
from tests.integrations.rank_runs import say


class SayStep(TrainerCallback):  # type: ignore[misc]
    """After a step, before its save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say(step=state.global_step)


def main(folder: Path, ref: str, resume: str | None) -> None:
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{os.environ['RANK']}") as store:
        trainer = hf.Trainer(**runs.parts(folder / "out", save_steps=2), callbacks=[SayStep()], store=store, ref=ref, asynchronous=False)
        trainer.train(resume_from_checkpoint=resume == "True" or resume)
        drawn = torch.rand(()).item()
        hashed = sum(tensor.double().sum().item() for tensor in trainer.model.state_dict().values())
        say(losses=runs.losses(trainer), weights=hashed, drawn=drawn)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else None)

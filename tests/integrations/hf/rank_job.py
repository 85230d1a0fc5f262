"""A run of transformers' Trainer under torchrun: ``rank_job FOLDER REF ddp|fsdp2 [RESUME]``.

Says each step, and at the end the losses, a hash of the whole weights and moments, and the next random number.
"""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from transformers import TrainerCallback

import tensorstore_ck as tsck
from tensorstore_ck.integrations import hf
from tests.integrations.hf import runs
from tests.integrations.rank_runs import say


class SayStep(TrainerCallback):  # type: ignore[misc]
    """After a step, before its save."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say(step=state.global_step)


def digest(state: Any) -> str:
    hashed = hashlib.sha256()

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for name in sorted(value):
                add(f"{path}.{name}", value[name])
        elif isinstance(value, torch.Tensor):
            hashed.update(path.encode() + value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())

    add("", state)
    return hashed.hexdigest()


def shard_on_cpu(trainer: hf.Trainer) -> None:
    """Sets what accelerate sets for FSDP on GPUs.

    On CPUs it takes no notice of `fsdp_plugin` (`AcceleratorState.__init__`), and trains with DDP. All that follows is its own.
    """
    state = trainer.accelerator.state
    assert state.distributed_type == DistributedType.MULTI_CPU
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    trainer.is_fsdp_enabled = True


def main(folder: Path, ref: str, kind: str, resume: str | None) -> None:
    with tsck.open(folder / "store", create=True, cache_dir=folder / f"cache-{os.environ['RANK']}") as store:
        sharded: dict[str, Any] = {"fsdp": True, "fsdp_config": {"version": 2}} if kind == "fsdp2" else {}
        given = runs.parts(folder / "out", save_steps=2, **sharded)
        trainer = hf.Trainer(**given, callbacks=[SayStep()], store=store, ref=ref, asynchronous=False)
        if sharded:
            shard_on_cpu(trainer)
        trainer.train(resume_from_checkpoint=resume == "True" or resume)
        drawn = torch.rand(()).item()
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        inner: Any = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        model, optimizer = get_state_dict(trainer.model, inner, options=options)
        tensors = type(next(trainer.model.parameters())).__name__
        say(losses=runs.losses(trainer), weights=digest(model), moments=digest(optimizer), kind=tensors, drawn=drawn)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else None)

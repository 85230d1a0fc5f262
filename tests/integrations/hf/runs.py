"""A small run of transformers' Trainer, over a store or natively."""

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from tensorstore_ck.integrations import hf
from tensorstore_ck.store import Store

REF = "runs/a"
STEPS = 12
Losses = list[tuple[int, float, float]]


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Equal in each run; 20 of them, so that an epoch has 10 steps."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words}


class Killed(Exception):
    """In place of a kill: the process goes on, without what it had in memory."""


class KillAfter(TrainerCallback):  # type: ignore[misc]
    """Ends a run after a step, before that step's save."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Killed


def parts(folder: Path, *, width: int = 8, **options: Any) -> dict[str, Any]:
    """The arguments of a Trainer, seeded as at the start of a script; dropout is on."""
    transformers.set_seed(7)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=width, n_layer=1, n_head=2, loss_type="ForCausalLMLoss"))
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        report_to=[],
        disable_tqdm=True,
        **{"max_steps": STEPS, "save_steps": 4, "logging_steps": 3, "learning_rate": 0.01, "use_cpu": True, **options},
    )
    return {"model": model, "args": args, "train_dataset": Sentences(), "eval_dataset": Sentences()}


def over_store(folder: Path, store: Store, *, kill_after: int | None = None, asynchronous: bool = True, **options: Any) -> hf.Trainer:
    callbacks = [] if kill_after is None else [KillAfter(kill_after)]
    return hf.Trainer(**parts(folder, **options), callbacks=callbacks, store=store, ref=REF, asynchronous=asynchronous)


def native(folder: Path, **options: Any) -> transformers.Trainer:
    return transformers.Trainer(**parts(folder, **options))


def losses(trainer: transformers.Trainer) -> Losses:
    """What was logged: step, loss and norm of the gradients."""
    return [(entry["step"], entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


def weights(trainer: transformers.Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, tensor in one.items() if not torch.equal(tensor, other[name])] == []

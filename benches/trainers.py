"""Trainers, native and over a store, side by side: `python -m benches.trainers lightning --folder /tmp/bench`, in some two minutes.

10 checkpoints of a GPT-2 with default settings (AdamW, nothing deleted, saves in the background): files and bytes on disk, how long the
training stands still for a save, how long a resume takes up to its first step, whether the resumed run is bit for bit the one that nothing
disturbed, and what is left after a kill -9 in the middle of the fifth save. Each run has a process of its own.
"""

import contextlib
import hashlib
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import accelerate
import lightning
import peft
import torch
import transformers
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

import tensorstore_ck as tsck
from benches._trainers_common import EACH, KILLED_SAVE, STEPS, CutError, Kill, Report, Trainers, main
from tensorstore_ck.integrations import hf

VOCABULARY, LENGTH = 2048, 32


class _Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words}


class _Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, end: int, kill: Kill | None) -> None:
        self.first_step = 0.0
        self._end, self._kill = end, kill

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = self.first_step or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._end:
            raise CutError
        if self._kill is not None and state.global_step == KILLED_SAVE:
            self._kill.strike()


def _model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def _with_lora(model: GPT2LMHeadModel) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))


def _hash(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()


def with_transformers(
    folder: Path,
    *,
    native: bool,
    end: int = 0,
    resume: bool = False,
    kill: Kill | None = None,
    adapt: Callable[[GPT2LMHeadModel], Any] = lambda model: model,
    **options: Any,
) -> Report:
    """A run up to `end`, or to its own; what was measured of it. `adapt` puts an adapter on the model; `options`: for our Trainer."""
    stalls: list[float] = []
    model = adapt(_model())
    settings: dict[str, Any] = {"max_steps": STEPS, "save_steps": EACH, "logging_steps": 4, "per_device_train_batch_size": 2}
    args = TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    watch = _Watch(end, kill)
    if kill is not None and native:
        kill.arm(torch, "save", file="optimizer")
    elif kill is not None:
        kill.arm_store()
    given: dict[str, Any] = {"model": model, "args": args, "train_dataset": _Words(), "callbacks": [watch]}
    with contextlib.ExitStack() as stack:
        if native:
            trainer = transformers.Trainer(**given)
        else:
            store = stack.enter_context(tsck.open(folder / "store", create=True, cache_dir=folder / "cache"))
            trainer = hf.Trainer(**given, store=store, ref="runs/bench", **options)
        save = trainer._save_checkpoint

        def timed(*arguments: Any, **named: Any) -> None:
            began = time.perf_counter()
            save(*arguments, **named)
            stalls.append(time.perf_counter() - began)

        trainer._save_checkpoint = timed
        began = time.perf_counter()
        with contextlib.suppress(CutError):
            trainer.train(resume_from_checkpoint=resume)
        if not native:
            store.drain()
    logged = [(each["step"], each["loss"]) for each in trainer.state.log_history if "loss" in each]
    return {
        "stalls": stalls,
        "until_first_step": watch.first_step - began,
        "losses": logged,
        "weights": _hash(model),
        "step": trainer.state.global_step,
    }


class _Module(lightning.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = _model()

    def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=5e-5)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(_Words(), batch_size=2, shuffle=True)


class _LightningWatch(Callback):  # type: ignore[misc]
    """Lightning calls it before the callback that saves."""

    def __init__(self, end: int, kill: Kill | None) -> None:
        self.first_step = 0.0
        self._end, self._kill = end, kill

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.first_step = self.first_step or time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._end:
            raise CutError
        if self._kill is not None and trainer.global_step == KILLED_SAVE:
            self._kill.strike()


class _Losses(CSVLogger):  # type: ignore[misc]
    """Keeps them in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.losses: list[tuple[int, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.losses += [(step or 0, value) for name, value in sorted(metrics.items()) if "loss" in name]


def with_lightning(folder: Path, *, native: bool, end: int = 0, resume: bool = False, kill: Kill | None = None) -> Report:
    """As `with_transformers`."""
    stalls: list[float] = []
    module = _Module()
    saved: dict[str, Any] = {"dirpath": folder / "out", "every_n_train_steps": EACH, "save_top_k": -1, "save_last": "link"}
    watch, logger = _LightningWatch(end, kill), _Losses(folder / "logs")
    if kill is not None and native:
        kill.arm(LocalFileOpener, "commit")
    elif kill is not None:
        kill.arm_store()
    with contextlib.ExitStack() as stack:
        if native:
            saves = ModelCheckpoint(**saved)
        else:
            store = stack.enter_context(tsck.open(folder / "store", create=True, cache_dir=folder / "cache"))
            saves = tsck.lightning.SnapshotCheckpoint(store, "runs/bench", **saved)
        save = saves.on_train_batch_end

        def timed(trainer: Any, *arguments: Any) -> None:
            began = time.perf_counter()
            save(trainer, *arguments)
            if trainer.global_step % EACH == 0:
                stalls.append(time.perf_counter() - began)

        saves.on_train_batch_end = timed
        options: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, "logger": logger}
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=STEPS, max_epochs=-1, default_root_dir=folder, callbacks=[watch, saves], **options
        )
        began = time.perf_counter()
        with contextlib.suppress(CutError):
            trainer.fit(module, ckpt_path="last" if resume else None)
        if not native:
            store.drain()
    return {
        "stalls": stalls,
        "until_first_step": watch.first_step - began,
        "losses": logger.losses,
        "weights": _hash(module),
        "step": trainer.global_step,
    }


class _Progress:
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def with_accelerate(folder: Path, *, native: bool, end: int = 0, resume: bool = False, kill: Kill | None = None) -> Report:
    """As `with_transformers`."""
    stalls, losses, first_step = list[float](), list[tuple[int, float]](), 0.0
    config = accelerate.utils.ProjectConfiguration(project_dir=str(folder / "out"), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=config)
    if kill is not None and native:
        kill.arm(torch, "save", file="optimizer")
    elif kill is not None:
        kill.arm_store()
    with contextlib.ExitStack() as stack:
        if not native:
            store = stack.enter_context(tsck.open(folder / "store", create=True, cache_dir=folder / "cache"))
            tsck.accelerate.attach(accelerator, store=store, ref="runs/bench")
        model, progress = _model(), _Progress()
        loader = torch.utils.data.DataLoader(_Words(), batch_size=2, shuffle=True)
        model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)
        accelerator.register_for_checkpointing(progress)
        began = time.perf_counter()
        if resume:
            accelerator.load_state()
            config.iteration = progress.step // EACH  # accelerate alone would save to an existing folder, which is an error
        while progress.step < (end or STEPS):
            done = progress.step % len(loader)
            for batch in accelerator.skip_first_batches(loader, done) if done else loader:
                first_step = first_step or time.perf_counter()
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                losses.append((progress.step, loss.item()))
                if kill is not None and progress.step == KILLED_SAVE:
                    kill.strike()
                if progress.step % EACH == 0:
                    saving = time.perf_counter()
                    accelerator.save_state()
                    stalls.append(time.perf_counter() - saving)
                if progress.step == (end or STEPS):
                    break
        accelerator.end_training()
    return {
        "stalls": stalls,
        "until_first_step": first_step - began,
        "losses": losses,
        "weights": _hash(model),
        "step": progress.step,
    }


TRAINERS: Final[Trainers] = {
    "transformers": (with_transformers, "tensorstore_ck.hf"),
    "peft": (partial(with_transformers, adapt=_with_lora), "tensorstore_ck.hf, peft"),
    "peft-base": (partial(with_transformers, adapt=_with_lora, save_base=True), "tensorstore_ck.hf, peft, save_base=True"),
    "lightning": (with_lightning, "tensorstore_ck.lightning"),
    "accelerate": (with_accelerate, "tensorstore_ck.accelerate"),
}


if __name__ == "__main__":
    main(__doc__, TRAINERS)

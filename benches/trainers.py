"""Trainers, native and over a store, side by side: `python -m benches.trainers lightning --folder /tmp/bench`, in some two minutes.

10 checkpoints of a GPT-2 with default settings (AdamW, nothing deleted, saves in the background): files and bytes on disk, how long the
training stands still for a save, how long a resume takes up to its first step, whether the resumed run is bit for bit the one that nothing
disturbed, and what is left after a kill -9 in the middle of the fifth save. Each run has a process of its own.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import accelerate
import lightning
import torch
import transformers
from fsspec.implementations.local import LocalFileOpener
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments, set_seed

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.integrations import hf

STEPS: Final = 30
EACH: Final = 3
CUT: Final = 20
"""A run that ends here, after the save of step 18, is resumed."""
KILLED_SAVE: Final = 15
VOCABULARY, LENGTH = 2048, 32
Report = dict[str, Any]


class _Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        words = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": words, "labels": words}


class _CutError(Exception):
    """In place of a kill between saves."""


class _Kill:
    """Kills this process in the middle of a save: in transformers' optimizer.pt, Lightning's file, or an object of the store."""

    def __init__(self) -> None:
        self._is_armed = False

    def arm(self, target: Any, *names: str, file: str = "") -> None:
        for name in names:
            patch.object(target, name, self._struck(getattr(target, name), file)).start()

    def _struck(self, original: Callable[..., Any], file: str) -> Callable[..., Any]:
        def struck(*arguments: Any, **named: Any) -> Any:
            if self._is_armed and (not file or file in str(arguments[1])):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **named)

        return struck

    def strike(self) -> None:
        self._is_armed = True


class _Watch(TrainerCallback):  # type: ignore[misc]
    def __init__(self, end: int, kill: _Kill | None) -> None:
        self.first_step = 0.0
        self._end, self._kill = end, kill

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.first_step = self.first_step or time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._end:
            raise _CutError
        if self._kill is not None and state.global_step == KILLED_SAVE:
            self._kill.strike()


def _model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


def _hash(model: torch.nn.Module) -> str:
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in model.state_dict().values())).hexdigest()


def _arm_store(kill: _Kill) -> None:
    kill.arm(LocalBackend, "create", "put", "open_writer")


def with_transformers(folder: Path, *, native: bool, end: int = 0, resume: bool = False, kill: _Kill | None = None) -> Report:
    """A run up to `end`, or to its own; what was measured of it."""
    stalls: list[float] = []
    model = _model()
    settings: dict[str, Any] = {"max_steps": STEPS, "save_steps": EACH, "logging_steps": 4, "per_device_train_batch_size": 2}
    args = TrainingArguments(output_dir=str(folder / "out"), use_cpu=True, report_to=[], disable_tqdm=True, **settings)
    watch = _Watch(end, kill)
    if kill is not None and native:
        kill.arm(torch, "save", file="optimizer")
    elif kill is not None:
        _arm_store(kill)
    given: dict[str, Any] = {"model": model, "args": args, "train_dataset": _Words(), "callbacks": [watch]}
    with contextlib.ExitStack() as stack:
        if native:
            trainer = transformers.Trainer(**given)
        else:
            store = stack.enter_context(tsck.open(folder / "store", create=True, cache_dir=folder / "cache"))
            trainer = hf.Trainer(**given, store=store, ref="runs/bench")
        save = trainer._save_checkpoint

        def timed(*arguments: Any, **named: Any) -> None:
            began = time.perf_counter()
            save(*arguments, **named)
            stalls.append(time.perf_counter() - began)

        trainer._save_checkpoint = timed
        began = time.perf_counter()
        with contextlib.suppress(_CutError):
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

    def __init__(self, end: int, kill: _Kill | None) -> None:
        self.first_step = 0.0
        self._end, self._kill = end, kill

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.first_step = self.first_step or time.perf_counter()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self._end:
            raise _CutError
        if self._kill is not None and trainer.global_step == KILLED_SAVE:
            self._kill.strike()


class _Losses(CSVLogger):  # type: ignore[misc]
    """Keeps them in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.losses: list[tuple[int, float]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.losses += [(step or 0, value) for name, value in sorted(metrics.items()) if "loss" in name]


def with_lightning(folder: Path, *, native: bool, end: int = 0, resume: bool = False, kill: _Kill | None = None) -> Report:
    """As `with_transformers`."""
    stalls: list[float] = []
    module = _Module()
    saved: dict[str, Any] = {"dirpath": folder / "out", "every_n_train_steps": EACH, "save_top_k": -1, "save_last": "link"}
    watch, logger = _LightningWatch(end, kill), _Losses(folder / "logs")
    if kill is not None and native:
        kill.arm(LocalFileOpener, "commit")
    elif kill is not None:
        _arm_store(kill)
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
        with contextlib.suppress(_CutError):
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


def with_accelerate(folder: Path, *, native: bool, end: int = 0, resume: bool = False, kill: _Kill | None = None) -> Report:
    """As `with_transformers`."""
    stalls, losses, first_step = list[float](), list[tuple[int, float]](), 0.0
    config = accelerate.utils.ProjectConfiguration(project_dir=str(folder / "out"), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=config)
    if kill is not None and native:
        kill.arm(torch, "save", file="optimizer")
    elif kill is not None:
        _arm_store(kill)
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


TRAINERS: Final[dict[str, tuple[Callable[..., Report], str]]] = {
    "transformers": (with_transformers, "tensorstore_ck.hf"),
    "lightning": (with_lightning, "tensorstore_ck.lightning"),
    "accelerate": (with_accelerate, "tensorstore_ck.accelerate"),
}


def apart(name: str, folder: Path, *, native: bool, **options: Any) -> Report | str:
    """A run in a process of its own; its error; or ``killed``."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            set_seed(3)
            report.write_text(json.dumps(TRAINERS[name][0](folder, native=native, **options)))
        except Exception as exc:  # noqa: BLE001 - reported to the parent
            report.write_text(json.dumps(f"{type(exc).__name__}: {exc}"))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        return "killed"
    found: Report | str = json.loads(report.read_text())
    return found


def _expect(report: Report | str) -> Report:
    if isinstance(report, str):
        raise SystemExit(report)
    return report


def row(name: str, folder: Path, *, native: bool) -> str:
    whole = _expect(apart(name, folder / "whole", native=native))
    files = (each for part in ("out", "store") for each in (folder / "whole" / part).rglob("*"))
    kept = [each for each in files if each.is_file() and not each.is_symlink()]
    stored = sum(each.stat().st_size for each in kept)
    _expect(apart(name, folder / "cut", native=native, end=CUT))
    resumed = _expect(apart(name, folder / "cut", native=native, resume=True))
    equal = [f"{each}: {'yes' if resumed[each] == whole[each][-len(resumed[each]) :] else 'no'}" for each in ("weights", "losses")]
    killed = apart(name, folder / "killed", native=native, kill=_Kill())
    survived = apart(name, folder / "killed", native=native, resume=True)
    after = f"yes, ends at step {survived['step']}" if isinstance(survived, dict) else f"no: {survived.partition(':')[0]}"
    assert killed == "killed"
    cells = [
        name if native else TRAINERS[name][1],
        f"{len(kept)}",
        f"{stored / 1e6:.0f} MB",
        f"{statistics.median(whole['stalls']) * 1e3:.0f} ms",
        f"{resumed['until_first_step'] * 1e3:.0f} ms",
        ", ".join(equal),
        after,
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("trainer", choices=TRAINERS)
    options.add_argument("--folder", type=Path, required=True)
    given = options.parse_args()
    folder = given.folder / "trainers"
    shutil.rmtree(folder, ignore_errors=True)
    print("| | files | bytes of 10 checkpoints | stall per save, median | resume to first step | exact | resumes after a kill in a save |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for native in (True, False):
        print(row(given.trainer, folder / ("native" if native else "ours"), native=native), flush=True)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()

"""torch_checkpointing's `CheckpointManager` and `tsck.CheckpointManager`, as `benches.trainers` has others.

`python -m benches.trainers_torch_checkpointing torch_checkpointing --folder /tmp/bench`, with version 0.1.1, and without its direct I/O,
which ext4 refuses. The loop is that of a user: it saves model, optimizer, step and generator, and finds the newest folder by its name.
"""

import contextlib
import hashlib
import importlib
import threading
import time
from pathlib import Path
from typing import Any, Final

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tensorstore_ck as tsck
from benches._trainers_common import EACH, KILLED_SAVE, STEPS, Kill, Report, Trainers, main

VOCABULARY, LENGTH = 2048, 32
NATIVE: Final = importlib.import_module("torch_checkpointing.checkpoint_manager").CheckpointManager
_STORAGE: Final = importlib.import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig


def _hash(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


def _newest_folder(out: Path) -> str | None:
    found = {int(each.name.removeprefix("step_")): each for each in out.glob("step_*")}
    return str(found[max(found)]) if found else None


def _kill_while_writing(out: Path, kill: Kill) -> None:
    """The files are written by another process, in a folder that is renamed at the end."""

    def watch() -> None:
        while not any(out.glob(f"*_step_{KILLED_SAVE}/*")):
            pass
        kill.now()

    threading.Thread(target=watch).start()


def _run(folder: Path, *, native: bool, sync: bool, end: int = 0, resume: bool = False, kill: Kill | None = None) -> Report:
    """A run up to `end`, or to its own; what was measured of it."""
    stalls, losses, first_step = list[float](), list[tuple[int, float]](), 0.0
    out = folder / "out"
    out.mkdir(exist_ok=True)
    config = NATIVE.Config.with_sync_save() if sync else NATIVE.Config.with_async_save()
    config.storage_config = _STORAGE(use_direct_io=False)
    if not sync:
        config.save.process_config.subprocess_init_timeout_secs = 600  # it imports this file, under the load of whatever else runs
    if kill is not None and native and sync:
        kill.arm(importlib.import_module("torch_checkpointing.checkpoint_writer").CheckpointWriter, "_write_key", file="optimizer")
    elif kill is not None and not native:
        kill.arm_store()
    manager: Any = config.build() if native else tsck.CheckpointManager(config, store=folder / "store", ref="runs/bench")
    settings = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=256, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(settings)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    began = time.perf_counter()
    with contextlib.closing(manager):
        if resume:
            newest = _newest_folder(out) if native else manager.newest_id()
            found = manager.load(
                newest, into={"model": model.state_dict(), "optimizer": None, "step": None, "generator": None}, strict=True
            )
            optimizer.load_state_dict(found["optimizer"])
            torch.set_rng_state(found["generator"])
            step = found["step"]
        while step < (end or STEPS):
            first_step = first_step or time.perf_counter()
            words = torch.randint(0, VOCABULARY, (2, LENGTH))
            loss = model(input_ids=words, labels=words).loss
            loss.backward()
            waiting = time.perf_counter()
            with manager.lock():
                waited = time.perf_counter() - waiting
                optimizer.step()
            optimizer.zero_grad()
            if stalls and step % EACH == 0:
                stalls[-1] += waited
            step += 1
            losses.append((step, loss.item()))
            if kill is not None and step == KILLED_SAVE:
                if native and not sync:
                    _kill_while_writing(out, kill)
                else:
                    kill.strike()
            if step % EACH == 0:
                saving = time.perf_counter()
                name = f"step_{step}"
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "generator": torch.get_rng_state()}
                manager.save(str(out / name) if native else name, state)
                stalls.append(time.perf_counter() - saving)
    moments = [each for values in optimizer.state.values() for each in values.values()]
    return {
        "stalls": stalls,
        "until_first_step": first_step - began,
        "losses": losses,
        "weights": _hash([*model.state_dict().values()]),
        "moments": _hash(moments),
        "generators": str(torch.rand(()).item()),
        "step": step,
    }


def synchronous(folder: Path, **options: Any) -> Report:
    return _run(folder, sync=True, **options)


def asynchronous(folder: Path, **options: Any) -> Report:
    return _run(folder, sync=False, **options)


TRAINERS: Final[Trainers] = {
    "torch_checkpointing": (asynchronous, "tsck.CheckpointManager"),
    "torch_checkpointing-sync": (synchronous, "tsck.CheckpointManager, synchronous"),
}


if __name__ == "__main__":
    main(__doc__, TRAINERS)

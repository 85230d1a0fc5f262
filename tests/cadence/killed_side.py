"""A job of several ranks that are killed at some call of a backend; in processes of its own."""

import os
import signal
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

import tensorstore_ck as tsck
from tests.crash.faulty import Faults, FaultyBackend

RANKS: Final = 2
STEPS: Final = 12
EVERY: Final = 2
DONE, ENDED = 0, 3
"""Exit codes: the training is done; it was ended, as its saves fail."""


class Killing(Faults):
    """Ends the process at a call, or fails each call from there on."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if self.mode == "kill" and self.calls + 1 == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().call(what, effect, tear, create=create)


def run(folder: str, rank: int, port: int, mode: str, at: int) -> None:
    """One rank, of a run that goes on from where the one before got to; writes down which step it resumed, and what it knows to be safe."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=20))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=20))
    group: Any = dist.group.WORLD
    torch.manual_seed(0)
    model = nn.Linear(200, 20)
    notes = Path(folder) / f"notes-{rank}"
    faults = Killing(mode, at, persistent=True)
    with tsck.open(f"{folder}/store", cache_dir=f"{folder}/cache-{rank}", codec="raw") as opened:
        opened.engine.backend = FaultyBackend(opened.engine.backend, faults, atomic_put=False)
        ckpt = tsck.Checkpointer(
            opened,
            tsck.TrainingState(model=model),
            ref="job",
            when=tsck.every_steps(EVERY),
            group=group,
            lead_steps=2,
            timeout_seconds=10.0,
            max_unsaved_seconds=1e-3,
        )
        code = ENDED
        try:
            resumed = ckpt.resume()
            step = resumed.step if resumed is not None else 0
            assert step is not None
            assert resumed is None or bool((model.weight == step).all())
            _note(notes, "resumed", step)
            while step < STEPS:
                step += 1
                dist.barrier(group)
                with torch.no_grad():
                    model.weight.fill_(step)
                pending = ckpt.step(step)
                if isinstance(pending, tsck.PendingSnapshot):
                    pending.published.on_settled(lambda it: _note(notes, "safe", it.step) if it.snapshot is not None else None)
            ckpt.close()
            code = DONE
        except tsck.StoreError as exc:
            _note(notes, f"ended by {type(exc).__name__}", 0)
    os._exit(code)


def _note(path: Path, what: str, step: int | None) -> None:
    with path.open("a") as file:
        file.write(f"{what} {step}\n")

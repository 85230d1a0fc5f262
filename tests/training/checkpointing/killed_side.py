"""A job of several ranks that are killed at some call of a backend; in processes of its own."""

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Faults, FaultyBackend

REF: Final = "job"
STEPS: Final = 24
EVERY: Final = 2
DONE, ENDED, RAISED, NOT_CONNECTED = 0, 3, 4, 5
"""Exit codes: the training is done; it was ended, as its saves fail; something else went wrong; gloo did not connect the ranks."""
TIMEOUT: Final = timedelta(seconds=PATIENCE_SECONDS / 2)


class Fault(NamedTuple):
    """What becomes of a rank."""

    mode: str = ""
    """``kill``, or a mode of `Faults`."""
    at: int = 0
    """At which call of its backend."""


class Rank(NamedTuple):
    """One process of a job, and where it is."""

    number: int
    ranks: int
    port: int
    """Of the store of their process group."""
    folder: str
    fault: Fault

    @property
    def notes(self) -> Path:
        """What it writes down for the launcher."""
        return Path(self.folder) / f"notes-{self.number}"


class Killing(Faults):
    """Ends the process at a call, or fails each call from there on."""

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if self.mode == "kill" and self.calls + 1 == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().call(what, effect, tear, create=create)


def connect(rank: Rank) -> None:
    """Begins the process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", rank.port, timeout=TIMEOUT)  # type: ignore[attr-defined]
    try:
        dist.init_process_group("gloo", store=store, rank=rank.number, world_size=rank.ranks, timeout=TIMEOUT)
    except RuntimeError:  # seen once in some thousand starts: "connectFullMesh failed: connection closed by peer"
        traceback.print_exc()
        sys.exit(NOT_CONNECTED)


def run(rank: Rank, form: str) -> None:
    """A job with a tiny model that is sharded over the ranks; `form`: ``training`` for a `TrainingState`, ``state`` for a state dict.

    Goes on from where the run before got to; writes down which step it resumed, and what it knows to be safe. Ends the process.
    """
    connect(rank)
    model: nn.Module = nn.Linear(200, 20)
    fully_shard(model)
    own = [each.detach().to_local() for each in model.parameters()]  # type: ignore[attr-defined]
    state: object = tsck.TrainingState(model=model) if form == "training" else {"model": model.state_dict()}
    code = RAISED
    try:
        _train(rank, state, own)
        code = DONE
    except tsck.StoreError as exc:
        code = ENDED
        _note(rank, f"ended by {_line(exc)}", 0)
    except BaseException as exc:  # noqa: BLE001 - the test reports it
        frames = traceback.extract_tb(exc.__traceback__)[-3:]
        _note(rank, f"raised {_line(exc)} ({', '.join(f'{Path(each.filename).name}:{each.lineno}' for each in frames)})", 0)
    os._exit(code)


def _train(rank: Rank, state: object, own: list[torch.Tensor]) -> None:
    """Each step fills this rank's tensors with its number."""
    group = dist.group.WORLD
    faults = Killing(rank.fault.mode, rank.fault.at, persistent=True)
    with tsck.open(f"{rank.folder}/store", cache_dir=f"{rank.folder}/cache-{rank.number}", codec="raw") as opened:
        opened.engine.backend = FaultyBackend(opened.engine.backend, faults, atomic_put=False)
        ckpt = tsck.Checkpointer(
            opened,
            state,
            ref=REF,
            when=tsck.every_steps(EVERY),
            group=group,
            lead_steps=2,
            timeout_seconds=PATIENCE_SECONDS / 2,
            max_unsaved_seconds=1e-3,
        )
        resumed = ckpt.resume()
        step = resumed.step if resumed is not None else 0
        assert step is not None
        wrong = [] if resumed is None else [tensor for tensor in own if not bool((tensor == step).all())]
        assert not wrong, f"{len(wrong)} tensors are not those of step {step}, such as {wrong[0]!r:.200}"
        _note(rank, "resumed", step)
        while step < STEPS:
            step += 1
            dist.barrier(group)
            for tensor in own:
                tensor.fill_(step)
            pending = ckpt.step(step)
            if isinstance(pending, tsck.PendingSnapshot):
                pending.published.on_settled(lambda it: _note(rank, "safe", it.step) if it.snapshot is not None else None)
        ckpt.close()


def _line(exc: BaseException) -> str:
    return " ".join(f"{type(exc).__name__}: {exc}".split())[:400]


def _note(rank: Rank, what: str, step: int | None) -> None:
    with rank.notes.open("a") as file:
        file.write(f"{what} {step}\n")

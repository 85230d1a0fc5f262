"""torchtitan's Trainer with its own `CheckpointManager` and with `tsck.titan.SnapshotManager`, as `benches.trainers` has others.

In the environment of `make test-apart`: `python -m benches.trainers_titan torchtitan --folder /tmp/bench`. ``torchtitan-async``:
with ``async_mode="async"``; ``torchtitan-noisy``: the training draws random numbers in its steps, as dropout does, which torchtitan's llama
has not.
"""

import contextlib
import hashlib
import time
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch
from torch.distributed.checkpoint import filesystem

from benches._trainers_common import CUT, EACH, KILLED_SAVE, STEPS, CutError, Kill, Report, Trainers, main
from tests.integrations.titan import runs

WORDS: Final = 2048


def _hash(tensors: dict[str, torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensors[name].numpy().tobytes() for name in sorted(tensors))).hexdigest()


class _Watch:
    """Times a Trainer, and ends it."""

    def __init__(self, end: int, kill: Kill | None, noise: float) -> None:
        self._end, self._kill, self._noise = end, kill, noise
        self.stalls: list[float] = []
        self.first_step = 0.0

    def begin(self, trainer: Any) -> None:
        """Called before the training."""
        self.trainer = trainer
        trainer.noise = self._noise
        saves = trainer.checkpointer
        save, process = saves.save, trainer.post_dataloading_process

        def timed(step: int, last_step: bool = False) -> Any:
            began = time.perf_counter()
            saved = save(step, last_step=last_step)
            if step % EACH == 0:
                self.stalls.append(time.perf_counter() - began)
            return saved

        def noted(*arguments: Any) -> Any:
            self.first_step = self.first_step or time.perf_counter()
            return process(*arguments)

        saves.save, trainer.post_dataloading_process = timed, noted
        self.began = time.perf_counter()

    def after(self, step: int) -> None:
        if self._end and step == self._end:
            self.trainer.checkpointer.maybe_wait_for_saving()
            raise CutError
        if self._kill is not None and step == KILLED_SAVE - 1:
            self.trainer.checkpointer.maybe_wait_for_saving()
            self._kill.strike()


def _run(
    folder: Path,
    *,
    native: bool,
    end: int = 0,
    resume: bool = False,
    kill: Kill | None = None,
    async_mode: str = "disabled",
    noise: float = 0.0,
) -> Report:
    """A run up to `end`, or to its own; what was measured of it."""
    options: dict[str, Any] = {"interval": EACH, "keep_latest_k": 10, "last_save_model_only": False, "async_mode": async_mode}
    checkpoint = runs.native(**options) if native else runs.snapshots(folder, **options)
    config = runs.make_config(folder, checkpoint, steps=STEPS)
    config.model_spec = runs.model_spec(256, 4, WORDS)
    config.lr_scheduler.total_steps = STEPS
    if kill is not None and native:
        kill.arm(filesystem, "_write_item")
    elif kill is not None:
        kill.arm_store()
    watch, run = _Watch(end, kill, noise), None
    with contextlib.suppress(CutError), mock.patch("torchtitan.tools.logging.logger.info"):
        run = runs.train(config, watch.after, watch.begin)
    found: Report = {"stalls": watch.stalls, "until_first_step": watch.first_step - watch.began, "step": watch.trainer.step}
    if run is not None:
        ends = {"weights": _hash(run.weights), "moments": _hash(run.moments), "losses": run.losses, "generators": str(run.drawn)}
        found |= ends
    return found


def with_torchtitan(folder: Path, **options: Any) -> Report:
    return _run(folder, **options)


def asynchronous(folder: Path, **options: Any) -> Report:
    return _run(folder, async_mode="async", **options)


def noisy(folder: Path, **options: Any) -> Report:
    return _run(folder, noise=0.2, **options)


TRAINERS: Final[Trainers] = {
    "torchtitan": (with_torchtitan, "tensorstore_ck.titan"),
    "torchtitan-async": (asynchronous, "tensorstore_ck.titan, async"),
    "torchtitan-noisy": (noisy, "tensorstore_ck.titan, noisy"),
}


if __name__ == "__main__":
    assert CUT % EACH, "a cut between saves"
    main(__doc__, TRAINERS)

"""Runs of torchtitan's Trainer in forked processes, which a call of the backend can kill with -9."""

from pathlib import Path
from unittest import mock

from tensorstore_ck import Store
from tests.integrations.kill_at import KillAt, forked, open_killable
from tests.integrations.titan import runs

STRUCK_STEP = 6
"""Kills strike in the saves of this step and later; that of step 3 is whole."""


def _train(folder: Path, faults: KillAt, async_mode: str) -> tuple[int, runs.Run]:
    def open_here(url: str) -> Store:
        return open_killable(url, faults)

    def count(trainer: runs.Noisy) -> None:
        """From the beginning of the struck step on, when the save before it has ended."""
        wait = trainer.checkpointer.maybe_wait_for_staging

        def wait_and_count() -> None:
            if trainer.step == STRUCK_STEP:
                trainer.checkpointer._wait_for_saving()
            faults.is_counting = trainer.step >= STRUCK_STEP
            wait()

        trainer.checkpointer.maybe_wait_for_staging = wait_and_count

    with mock.patch("tensorstore_ck.integrations.titan.snapshot_manager.opened", open_here):
        config = runs.make_config(folder, runs.snapshots(folder, async_mode=async_mode), steps=8)
        run = runs.train(config, before=count)
    return faults.calls, run


def run(folder: Path, *, at: int = 0, torn: bool = False, async_mode: str = "disabled") -> tuple[int, runs.Run] | None:
    """A run in a process of its own, and its calls since the struck step; None if it was killed, at call `at`."""
    return forked(lambda: _train(folder, KillAt(at, torn=torn), async_mode), folder)

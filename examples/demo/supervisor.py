"""Runs the job in its own process, reads its output, and kills it with SIGKILL at a given moment.

Knows only the job's output (see `train.say`), and that a save creates files under ``packs/``.
"""

import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO


class JobFailedError(Exception):
    """The job failed by itself."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill: some time after a step, or during its save, as soon as the first bytes are on the disk."""

    step: int
    in_put: bool
    delay: float
    """In units of a step's duration, to fit any machine and model."""


@dataclass(slots=True)
class Life:
    """The output of one process of the job."""

    killed: bool = False
    resumed: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    putting: int | None = None
    """The step whose save was running at the end."""
    saved: int | None = None
    fingerprint: str | None = None
    """Of its state in memory after the last step; None if it was killed before."""
    unfinished_bytes: int = 0
    """The bytes in packs of the save that was running at the end."""

    @property
    def last_step(self) -> int:
        """The last completed step, or the step from which it resumed."""
        return max(self.losses, default=self.resumed)

    def record(self, line: str) -> None:
        """Records one line of the job's output; ignores a line that was cut off."""
        match line.split(" ") if line.endswith("\n") else []:
            case ["resumed", step]:
                self.resumed = int(step)
            case ["step", step, loss]:
                self.losses[int(step)] = loss.strip()
            case ["putting", step]:
                self.putting = int(step)
            case ["saved", step, _]:
                self.saved, self.putting = int(step), None
            case ["done", _, fingerprint]:
                self.fingerprint = fingerprint.strip()


def run_job(
    command: Sequence[str], environment: Mapping[str, str], store: Path, moment: Moment | None, on_output: Callable[[Life], None]
) -> Life:
    """Runs the job until it ends, or until `moment`, when it is killed.

    Raises:
        JobFailedError: it failed.
    """
    life = Life()
    signalled = False
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            packs, step_begun, step_seconds = find_packs(store), time.monotonic(), 0.0
            for line in process.stdout:
                life.record(line)
                on_output(life)
                if line.startswith("step "):
                    step_seconds = time.monotonic() - step_begun
                if moment is not None and _has_come(moment, life):
                    if moment.in_put:
                        _wait_for_pack(store, packs, process.stdout)
                    time.sleep(moment.delay * step_seconds)
                    process.kill()
                    signalled = True
                    break
                if life.putting is None:
                    packs, step_begun = find_packs(store), time.monotonic()
            for line in process.stdout:
                life.record(line)
        except BaseException:
            process.kill()
            raise
    life.killed = signalled and process.returncode == -signal.SIGKILL  # it may have ended before the signal
    if process.returncode and not life.killed:
        raise JobFailedError(f"the job ended with exit code {process.returncode} after step {life.last_step}")
    if life.putting is not None:
        life.unfinished_bytes = sum(pack.stat().st_size for pack in find_packs(store) - packs)
    return life


def _has_come(moment: Moment, life: Life) -> bool:
    step = life.putting if moment.in_put else life.last_step
    return step is not None and step >= moment.step


def _wait_for_pack(store: Path, before: set[Path], output: IO[str]) -> None:
    """Waits for a new pack, or for the job's next output."""
    while not find_packs(store) - before and not wait([output.fileno()], 0.0002):
        pass


def find_packs(store: Path) -> set[Path]:
    """All packs in the store, used or not."""
    return set(store.glob("packs/*/*"))

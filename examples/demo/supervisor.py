"""Runs the job as a process of its own, listens to what it says, and kills it with SIGKILL at a given moment.

It knows the job's output (see `train.say`) and that a put makes files under ``packs/``; nothing else.
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
    """The job ended by itself, with an error."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When to kill: some time after a step, or in the put of that step, as soon as its first bytes are on the disk."""

    step: int
    in_put: bool
    delay: float
    """In units of the time that a step takes, so that it fits machines and models of any speed."""


@dataclass(slots=True)
class Life:
    """What one process of the job said, from its start to its end."""

    killed: bool = False
    resumed: int = 0
    losses: dict[int, str] = field(default_factory=dict)
    putting: int | None = None
    """The step of the put that was under way at the end."""
    saved: int | None = None
    fingerprint: str | None = None
    """Of its state in memory after the last step; None if it did not get there."""
    unfinished_bytes: int = 0
    """What the put that was under way had written to packs."""

    @property
    def last_step(self) -> int:
        """The last step that it completed; where it began, if none."""
        return max(self.losses, default=self.resumed)

    def hear(self, line: str) -> None:
        """Notes one line of the job's output; a line that the kill cut off is ignored."""
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


def live(command: Sequence[str], environment: Mapping[str, str], store: Path, moment: Moment | None, heard: Callable[[Life], None]) -> Life:
    """Starts the job and listens until it ends, or until `moment`, when it is killed.

    Raises:
        JobFailedError: it ended with an error.
    """
    life = Life()
    asked = False
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            packs, step_begun, step_seconds = find_packs(store), time.monotonic(), 0.0
            for line in process.stdout:
                life.hear(line)
                heard(life)
                if line.startswith("step "):
                    step_seconds = time.monotonic() - step_begun
                if moment is not None and _has_come(moment, life):
                    if moment.in_put:
                        _wait_for_pack(store, packs, process.stdout)
                    time.sleep(moment.delay * step_seconds)
                    process.kill()
                    asked = True
                    break
                if life.putting is None:
                    packs, step_begun = find_packs(store), time.monotonic()
            for line in process.stdout:
                life.hear(line)
        except BaseException:
            process.kill()
            raise
    life.killed = asked and process.returncode == -signal.SIGKILL  # it may have been through before the signal came
    if process.returncode and not life.killed:
        raise JobFailedError(f"the job ended with exit code {process.returncode} after step {life.last_step}")
    if life.putting is not None:
        life.unfinished_bytes = sum(pack.stat().st_size for pack in find_packs(store) - packs)
    return life


def _has_come(moment: Moment, life: Life) -> bool:
    step = life.putting if moment.in_put else life.last_step
    return step is not None and step >= moment.step


def _wait_for_pack(store: Path, before: set[Path], output: IO[str]) -> None:
    """Returns when a new pack is there, or when the job has gone on without one."""
    while not find_packs(store) - before and not wait([output.fileno()], 0.0002):
        pass


def find_packs(store: Path) -> set[Path]:
    """The packs in the store, whether a snapshot names them or not."""
    return set(store.glob("packs/*/*"))

"""What the benches of trainers share: the runs of a trainer in processes of their own, with and without a kill; their table."""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np
import torch

from tensorstore_ck.backend.local import LocalBackend

STEPS: Final = 30
EACH: Final = 3
CUT: Final = 20
"""A run that ends here, after the save of step 18, is resumed."""
KILLED_SAVE: Final = 15
Report = dict[str, Any]
Trainers = dict[str, tuple[Callable[..., Report], str]]
"""Name -> function that runs it, and what saves for it in a store."""
_EXACT: Final = ("weights", "moments", "losses", "generators")
"""What a report may have of a run, to be compared."""


class CutError(Exception):
    """In place of a kill between saves."""


class Kill:
    """Kills this process in the middle of a save: in a file of the trainer, or in an object of the store."""

    def __init__(self) -> None:
        self._is_armed = False

    def arm(self, target: Any, *names: str, file: str = "") -> None:
        for name in names:
            patch.object(target, name, self._struck(getattr(target, name), file)).start()

    def arm_store(self) -> None:
        self.arm(LocalBackend, "create", "put", "open_writer")

    def _struck(self, original: Callable[..., Any], file: str) -> Callable[..., Any]:
        def struck(*arguments: Any, **named: Any) -> Any:
            if self._is_armed and (not file or file in str(arguments[1])):
                self.now()
            return original(*arguments, **named)

        return struck

    def strike(self) -> None:
        self._is_armed = True

    def now(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def apart(run: Callable[..., Report], folder: Path, *, native: bool, **options: Any) -> Report | str:
    """A run in a process of its own; its error; or ``killed``."""
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if pid == 0:
        try:
            torch.set_num_threads(1)
            random.seed(3)
            np.random.seed(3)
            torch.manual_seed(3)
            report.write_text(json.dumps(run(folder, native=native, **options)))
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


def row(title: str, run: Callable[..., Report], folder: Path, *, native: bool) -> str:
    whole = _expect(apart(run, folder / "whole", native=native))
    files = (each for part in ("out", "store") for each in (folder / "whole" / part).rglob("*"))
    kept = [each for each in files if each.is_file() and not each.is_symlink()]
    stored = sum(each.stat().st_size for each in kept)
    _expect(apart(run, folder / "cut", native=native, end=CUT))
    resumed = _expect(apart(run, folder / "cut", native=native, resume=True))
    equal = [f"{each}: {'yes' if resumed[each] == whole[each][-len(resumed[each]) :] else 'no'}" for each in _EXACT if each in whole]
    killed = apart(run, folder / "killed", native=native, kill=Kill())
    survived = apart(run, folder / "killed", native=native, resume=True)
    after = f"yes, ends at step {survived['step']}" if isinstance(survived, dict) else f"no: {survived.partition(':')[0]}"
    assert killed == "killed"
    cells = [
        title,
        f"{len(kept)}",
        f"{stored / 1e6:.0f} MB",
        f"{statistics.median(whole['stalls']) * 1e3:.0f} ms",
        f"{resumed['until_first_step'] * 1e3:.0f} ms",
        ", ".join(equal),
        after,
    ]
    return f"| {' | '.join(cells)} |"


def main(description: str | None, trainers: Trainers) -> None:
    """The table of one of them."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("trainer", choices=trainers)
    options.add_argument("--folder", type=Path, required=True)
    options.add_argument("--rounds", type=int, default=1, help="native and over a store by turns")
    given = options.parse_args()
    folder = given.folder / "trainers"
    run, ours = trainers[given.trainer]
    print("| | files | bytes of 10 checkpoints | stall per save, median | resume to first step | exact | resumes after a kill in a save |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for _ in range(given.rounds):
        for native in (True, False):
            shutil.rmtree(folder, ignore_errors=True)
            print(row(given.trainer if native else ours, run, folder, native=native), flush=True)
    shutil.rmtree(folder)

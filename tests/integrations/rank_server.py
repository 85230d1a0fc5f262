"""Runs jobs as torchrun does, in ranks that are forked from a process that has imported all that they need; `rank_runs` starts it.

Each line of stdin asks for one job, as JSON with the fields of `Asked`. What its ranks print goes to stdout; after they have ended, a line
``{"codes": [...]}`` follows. Where one fails, the others get SIGTERM. The process ends with its stdin.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn


class Asked(NamedTuple):
    """A job: a module that is run as ``python -m``, in a folder."""

    job: str
    arguments: list[str]
    ranks: int
    folder: str
    environment: dict[str, str]


def main() -> None:
    for line in sys.stdin:
        codes = _run(Asked(**json.loads(line)))
        os.write(1, f"\n{json.dumps({'codes': codes})}\n".encode())


def _run(asked: Asked) -> list[int]:
    """The exit codes of its ranks; those of signals are negative."""
    importlib.import_module(asked.job)
    ranks = [_forked(asked, rank) for rank in range(asked.ranks)]

    def end(*_: object) -> None:
        _kill(ranks)
        os._exit(1)

    signal.signal(signal.SIGTERM, end)
    codes: dict[int, int] = {}
    while len(codes) < len(ranks):
        pid, status = os.wait()
        codes[pid] = os.waitstatus_to_exitcode(status)
        for other in ranks if codes[pid] else ():
            if other not in codes:
                os.kill(other, signal.SIGTERM)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _kill(ranks)
    return [codes[pid] for pid in ranks]


def _kill(ranks: list[int]) -> None:
    """With all that they have started and left."""
    for pid in ranks:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _forked(asked: Asked, rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        os.setsid()
        _be_rank(asked, rank)
    return pid


def _be_rank(asked: Asked, rank: int) -> NoReturn:
    code: Any = 1
    try:
        os.chdir(asked.folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open("stderr.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        os.environ.update(asked.environment, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(asked.ranks))
        sys.argv[1:] = asked.arguments
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*found in sys.modules")
            runpy.run_module(asked.job, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as exc:
        code = exc.code or 0
    except BaseException:  # noqa: BLE001 - a rank must not go on as its server
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined] # as Python ends, but for the seconds that it takes to free all that is imported
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    main()

"""A process that has imported torch and forks one process for each scene, which then ends as an interpreter does.

Importing torch takes longer than most of these processes live. What a scene found out it says in a file, a line each, in one write, which
SIGKILL cannot tear.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from tests.effort import PATIENCE_SECONDS

DEADLINE_SECONDS: Final = PATIENCE_SECONDS
"""Of a scene."""


def watch(seconds: float) -> None:
    """A process that hangs says where, and ends. A thread of Python's own: that of `faulthandler` does not survive a fork."""

    def end() -> None:
        faulthandler.dump_traceback()
        os._exit(99)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def say(folder: str, **said: object) -> None:
    fd = os.open(f"{folder}/said", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, json.dumps(said).encode() + b"\n")
    os.close(fd)


def heard(folder: Path) -> list[dict[str, Any]]:
    path = folder / "said"
    return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


class Nursery:
    """What a test holds of it. A context manager."""

    def __enter__(self) -> "Nursery":
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[3]), *sys.path]))}
        command = [sys.executable, "-m", "tests.session.save.worker"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=DEADLINE_SECONDS)

    def begin(self, scene: Callable[..., None], folder: Path, *args: object) -> int:
        """The process id; what it writes to stderr is in ``folder/stderr``."""
        folder.mkdir(exist_ok=True)
        return int(self._ask(scene.__name__, str(folder), *args))

    def await_end(self, pid: int) -> int:
        """Its exit code, or minus the signal that ended it."""
        code = self._ask("wait", pid)
        assert code is not None, "the process does not end"
        return int(code)

    def run(self, scene: Callable[..., None], folder: Path, *args: object) -> int:
        return self.await_end(self.begin(scene, folder, *args))

    def _ask(self, *request: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


def serve() -> tuple[str, list[Any]] | None:
    """Answers requests; in a forked child, which scene it is to play."""
    alive: set[int] = set()
    for line in iter(sys.stdin.readline, ""):
        name, *args = json.loads(line)
        if name == "wait":
            print(json.dumps(exit_code(args[0])), flush=True)
            alive.discard(args[0])
            continue
        pid = os.fork()
        if pid == 0:
            null, log = os.open(os.devnull, os.O_RDWR), os.open(f"{args[0]}/stderr", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            for fd, place in ((null, 0), (null, 1), (log, 2)):
                os.dup2(fd, place)
            return name, args
        alive.add(pid)
        print(json.dumps(pid), flush=True)
    for pid in alive:  # nobody waits for them: the test has failed
        os.kill(pid, signal.SIGKILL)
    return None


def exit_code(pid: int) -> int | None:
    """None: it did not end, and was killed."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None

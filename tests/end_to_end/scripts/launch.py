"""Programs that a test starts and listens to: a script, or torchrun with its ranks. It knows none of them.

Nothing that was started outlives the test: neither ranks, which torchrun gives sessions of their own, nor what hangs.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.effort import PATIENCE_SECONDS

REPOSITORY = Path(__file__).parents[3]
SECONDS = 4 * PATIENCE_SECONDS
"""A whole training, not one answer."""


class Program:
    """A running program, as `launched` gives it."""

    def __init__(self, process: subprocess.Popen[str], errors: Path) -> None:
        self._process = process
        self._errors = errors

    def lines(self) -> Iterator[str]:
        """What it prints, until it ends."""
        assert self._process.stdout is not None
        return self._process.stdout

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Reads on to the first line in which there is `pattern`."""
        for line in self.lines():
            found = re.search(pattern, line)
            if found:
                return found
        raise AssertionError(f"it ended without {pattern!r}:\n{self.errors()}")

    def send(self, signal_number: int) -> None:
        """To the program itself."""
        self._process.send_signal(signal_number)

    def workers(self) -> list[int]:
        """The processes that it has started."""
        return children(self._process.pid)

    def end(self) -> tuple[int, str]:
        """Waits for its end; returns its exit code, and what it printed since the last line that was read."""
        printed = "".join(self.lines())
        return self._process.wait(), printed

    def errors(self) -> str:
        """What it has written on stderr."""
        return self._errors.read_text()


@contextmanager
def launched(arguments: list[str], folder: Path, seconds: float = SECONDS, /, **variables: str) -> Iterator[Program]:
    """Runs ``python`` with `arguments` in `folder`; what still runs after `seconds`, or at the end of the block, is killed.

    `variables` are added to the environment.
    """
    errors = folder / "stderr.log"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",  # as torchrun says, too
        "XDG_CACHE_HOME": str(folder / "cache"),
        "RES_OPTIONS": "timeout:1 attempts:1",  # torch's store asks for the name of every client, and here nobody may answer
        **variables,
    }
    with errors.open("a") as stderr:
        process = subprocess.Popen(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
    watch = threading.Timer(seconds, kill, [process])
    watch.start()
    with process:
        try:
            yield Program(process, errors)
        finally:
            watch.cancel()
            kill(process)


def torchrun(ranks: int, *arguments: str, restarts: int = 0) -> list[str]:
    """For `launched`: on a free port, so that tests can run at the same time."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    return ["-m", "torch.distributed.run", *options, *arguments]


def free_port(ports: int = 1) -> int:
    """The first of consecutive ports that nobody listens on."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            with suppress(OSError, OverflowError):
                for other in range(port + 1, port + ports):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", other))
                return port


def kill(process: subprocess.Popen[str]) -> None:
    """With all that it has started, if it still runs."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGSTOP)  # so that it starts nothing any more
    workers = children(process.pid)
    process.kill()
    for worker in workers:
        os.kill(worker, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Processes that a process has started and not waited for."""
    return [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()]

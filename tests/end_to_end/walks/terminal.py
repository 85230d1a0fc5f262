"""bash in a real terminal: a window of tmux, 80 columns by 24 lines, of which a test types and reads as a user does.

It waits for output, which tmux also copies into a FIFO: nothing sleeps. It pages through what a pager holds.
"""

import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Final, Self

import pytest

from tests.effort import PATIENCE_SECONDS

COLUMNS, LINES = 80, 24
_OPTIONS: Final = "set -g history-limit 100000\nset -g status off\nset -g default-terminal screen-256color\n"
_BEGIN: Final = "--- begin"
_SHELL: Final = {
    "PS0": f"{_BEGIN}\n",  # before the output of each command
    "PROMPT_COMMAND": "prompts=$((prompts + 1))",
    "PS1": "--- $prompts $? ",
    "prompts": "0",
    "HISTFILE": "",
}
_PAGERS: Final = (":", "(END)")
_BELL: Final = b"\a"


class Terminal:
    """A window whose shell is in the current folder, with the environment of this process. A context manager."""

    def __init__(self) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("tmux is not installed")
        self._prompts = 1
        self._output = b""
        self._open = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as opening:
            folder = Path(opening.enter_context(TemporaryDirectory(prefix="tsck-")))
            self._socket, options, copied, alive = (folder / name for name in ("socket", "options", "output", "alive"))
            options.write_text(_OPTIONS)
            for fifo in (copied, alive):
                os.mkfifo(fifo)
            self._fifo = os.open(copied, os.O_RDONLY | os.O_NONBLOCK)
            opening.callback(os.close, self._fifo)
            opening.callback(os.close, os.open(alive, os.O_RDWR))
            variables = [argument for name, value in _SHELL.items() for argument in ("-e", f"{name}={value}")]
            size = ("-x", str(COLUMNS), "-y", str(LINES))
            self._tmux("-f", str(options), "new-session", "-d", *size, *variables, "bash", "--norc", "--noprofile")
            opening.callback(self._tmux, "kill-server")
            self._tmux("run-shell", "-b", f"cat '{alive}'; tmux -S '{self._socket}' kill-server")  # when this process was killed
            self._tmux("pipe-pane", f"cat > '{copied}'")
            self._finish()
            self._open = opening.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._open.close()

    def run(self, line: str) -> tuple[str, int]:
        """Types a line and Enter. Returns what the command printed, lines that the terminal wrapped as one, and its exit code."""
        self.begin(line)
        return self.end()

    def begin(self, line: str) -> None:
        """Types a line and Enter, and does not wait."""
        self._tmux("clear-history")
        self.type(line)
        self._prompts += 1
        self.press("Enter")

    def end(self) -> tuple[str, int]:
        """Waits until the command of `begin` has ended. See `run`."""
        code = self._finish()
        shown = self.screen()
        begin = shown.rindex(_BEGIN + "\n") + len(_BEGIN) + 1
        return shown[begin : shown.rindex(f"--- {self._prompts} ")], code

    def type(self, text: str) -> None:
        """Types a text without Enter."""
        self._output = b""
        self._tmux("send-keys", "-l", "--", text)

    def press(self, key: str) -> None:
        """Presses a key, such as ``Enter``, ``Tab`` or ``C-c``."""
        self._output = b""
        self._tmux("send-keys", key)

    def complete(self, text: str, completed: str) -> None:
        """Types a text, presses Tab until the shell has made `completed` of it, and drops the line.

        Tab again where the bell rings: on a busy machine a completion gives up at its deadline.
        """
        self.type(text)
        self.until(lambda: text in self._last_line())
        while completed not in self._last_line():
            self.press("Tab")
            self.until(lambda: completed in self._last_line() or _BELL in self._output)
        self._prompts += 1
        self.press("C-c")
        self._finish()

    def screen(self, *, colours: bool = False) -> str:
        """All that is in the window, and what has scrolled out of it since the last `begin`; wrapped lines as one."""
        text = self._tmux("capture-pane", "-p", "-J", "-S", "-", *(["-e"] if colours else []))
        return "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())

    def until(self, holds: Callable[[], object]) -> None:
        """Waits for output until `holds`."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not holds():
            left = deadline - time.monotonic()
            assert left > 0, f"not within {PATIENCE_SECONDS:.0f} s:\n{self.screen()}"
            if select.select([self._fifo], [], [], left)[0]:
                more = os.read(self._fifo, 1 << 16)
                assert more, "tmux has ended"
                self._output += more

    def _finish(self) -> int:
        """Waits for the next prompt, past pagers; the exit code in it."""
        prompt = re.compile(rf"--- {self._prompts} (\d+)$")

        def is_there() -> bool:
            if self._last_line() in _PAGERS:
                self.press("Space" if self._last_line() == ":" else "q")
            return prompt.search(self._last_line()) is not None

        self.until(is_there)
        found = prompt.search(self._last_line())
        assert found is not None
        return int(found[1])

    def _last_line(self) -> str:
        """The row of the cursor, or the last one with a text: a pager's prompt is not joined with the line above it."""
        return self._tmux("capture-pane", "-p").rstrip().rpartition("\n")[2]

    def _tmux(self, *arguments: str) -> str:
        command = ("tmux", "-S", str(self._socket), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS).stdout

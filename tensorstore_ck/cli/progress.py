"""Progress bars, on stderr and only where that is a terminal; and a backend that counts bytes, to feed them.

Threads may report at any time. A bar never changes what a command does or prints on stdout. `rich` is loaded with the first report.
"""

import sys
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self, cast

from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.cli.output import clear_line, printable, say
from tensorstore_ck.common.buffers import Buffer

if TYPE_CHECKING:
    from rich.progress import Progress


class Bar:
    """A bar that appears with the first report and goes at the end. A context manager."""

    def __init__(self, label: str = "") -> None:
        self._label, self._done, self._total = label, 0, 0
        self._lock = threading.Lock()
        self._shown = sys.stderr.isatty()
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        with self._lock:
            if self._bar is not None:
                if not failed:
                    self._show(self._total)  # bytes that the store already had were not reported
                self._bar.stop()
            self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """Reports bytes done, of bytes in all."""
        with self._lock:
            self._total = total
            self._show(done)

    def add(self, count: int) -> None:
        """Reports `count` more bytes."""
        with self._lock:
            self._show(self._done + count)

    def expect(self, total: int) -> None:
        """Sets about how many bytes `add` will report."""
        self._total = total

    def phase(self, what: str, done: int, total: int) -> None:
        """Reports the current work, and how many of how many steps are done."""
        with self._lock:
            if what != self._label:
                self._label, self._done = what, 0
            self._total = total
            self._show(done)

    def say(self, line: str) -> None:
        """Prints a line on stdout, above the bar."""
        with self._lock:
            if self._bar is not None:
                clear_line()
            say(line)

    def _show(self, done: int) -> None:
        self._done = min(max(done, self._done), self._total)
        if not self._shown or self._total <= 0:
            return
        if self._bar is None:
            self._bar = _started(self._label)
        label = _shortened(self._label, self._bar.console.width // 2)
        self._bar.update(self._bar.task_ids[0], description=label, completed=self._done, total=self._total)


def _shortened(label: str, width: int) -> str:
    """The most characters of a label: a longer one would leave no room for the percentage."""
    text = printable(label)
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _started(label: str) -> "Progress":
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    console = Console(file=sys.stderr)
    bar = Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
    bar.add_task(_shortened(label, console.width // 2))
    bar.start()
    return bar


class CountingBackend:
    """A backend that reports the bytes of blocks that it reads and writes to a bar."""

    def __init__(self, backend: Backend, bar: Bar) -> None:
        self._backend, self._bar = backend, bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Reads, then counts."""
        self._backend.read_into(name, offset, target)
        self._bar.add(len(target))

    def open_writer(self, name: str) -> ObjectWriter:
        """A writer that counts."""
        return cast(ObjectWriter, _CountingWriter(self._backend.open_writer(name), self._bar))


class _CountingWriter:
    def __init__(self, writer: ObjectWriter, bar: Bar) -> None:
        self._writer, self._bar = writer, bar

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def append(self, data: Sequence[Buffer]) -> int:
        offset = self._writer.append(data)
        self._bar.add(sum(len(buffer) for buffer in data))
        return offset

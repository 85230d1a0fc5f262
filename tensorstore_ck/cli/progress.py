"""Progress bars, on stderr and only where that is a terminal; and a backend that counts what it writes, to feed them.

Threads may report at any time. A bar never changes what a command does or prints on stdout. `rich` is loaded with the first report.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Self

from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.cli.output import clear_line, printable, say
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.units import human_bytes

if TYPE_CHECKING:
    from rich.progress import Progress

BAR_CELLS: Final = 10
_OTHER_CELLS: Final = BAR_CELLS + len("100%") + len("0:00:00") + 4
"""Cells for the bar, the percentage, the time that is left, and spaces between columns."""
_MIN_LABEL: Final = 10


class Bar:
    """A bar that appears with the first report and goes at the end, with bytes, rate and the time that is left. A context manager."""

    def __init__(self, label: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._label, self._done, self._total = label, 0, 0
        self._clock, self._since = clock, clock()
        """When the work that is counted began."""
        self._counts_bytes = True
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
            self._total, self._counts_bytes = total, True
            self._show(done)

    def add(self, count: int) -> None:
        """Reports `count` more bytes."""
        with self._lock:
            self._counts_bytes = True
            self._show(self._done + count)

    def expect(self, total: int) -> None:
        """Sets about how many bytes `add` will report from now on."""
        with self._lock:
            self._total, self._since = total, self._clock()

    def phase(self, what: str, done: int, total: int) -> None:
        """Reports the current work, and how many of how many steps are done."""
        with self._lock:
            if what != self._label:
                self._label, self._done, self._since = what, 0, self._clock()
            self._total, self._counts_bytes = total, False
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
            self._bar = _new_bar()
        label, amount = self._texts(self._bar.console.width)
        self._bar.update(self._bar.task_ids[0], description=label, amount=amount, completed=self._done, total=self._total)
        self._bar.start()

    def _texts(self, columns: int) -> tuple[str, str]:
        """The label and the bytes, which are left out where a terminal is too narrow for both; the percentage always has its place."""
        label, amount = printable(self._label), ""
        if self._counts_bytes:
            seconds = self._clock() - self._since
            rate = f", {human_bytes(int(self._done / seconds))}/s" if seconds > 0 else ""
            amount = f"{human_bytes(self._done)} of {human_bytes(self._total)}{rate}"
        left = columns - _OTHER_CELLS - len(amount) - 1
        if not amount or left < min(len(label), _MIN_LABEL):
            return _shortened(label, columns // 2), ""
        return _shortened(label, left), amount


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: max(width - 1, 0)]}…"


def _new_bar() -> "Progress":
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs it
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    texts = [TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[amount]")]
    columns = texts[0], BarColumn(BAR_CELLS), TaskProgressColumn(), texts[1], TimeRemainingColumn()
    bar = Progress(*columns, console=Console(file=sys.stderr), transient=True, redirect_stdout=False, redirect_stderr=False)
    bar.add_task("", amount="")
    return bar


class CountingBackend(ForwardingBackend):
    """A backend that reports the bytes that it writes to a bar."""

    def __init__(self, backend: Backend, bar: Bar) -> None:
        super().__init__(backend)
        self._bar = bar

    def open_writer(self, name: str) -> ObjectWriter:
        """A writer that counts."""
        return _CountingWriter(self.inner.open_writer(name), self._bar)


class _CountingWriter:
    def __init__(self, writer: ObjectWriter, bar: Bar) -> None:
        self._writer, self._bar = writer, bar

    def append(self, data: Sequence[Buffer]) -> int:
        offset = self._writer.append(data)
        self._bar.add(sum(len(buffer) for buffer in data))
        return offset

    def close(self) -> None:
        self._writer.close()

    def abort(self) -> None:
        self._writer.abort()

"""Progress bars, on stderr and only where that is a terminal; and a backend that counts, to feed them.

Threads may report at any time. A bar never changes what a command does or prints on stdout.
"""

import sys
import threading
from collections.abc import Sequence
from typing import Any, Self, TextIO, cast

import click

from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.cli.output import say
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.units import human_bytes


class Bar:
    """A bar that appears with the first report. A context manager."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._lock = threading.Lock()
        self._total = 0
        self._done = 0
        self._bar: Any = None
        self._shown = sys.stderr.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        with self._lock:
            if self._bar is not None:
                if not failed:
                    self._move(self._total)  # what was there already did not go through
                self._bar.render_finish()
            self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """Reports bytes done, of bytes in all."""
        with self._lock:
            self._total = total
            self._move(done)

    def add(self, count: int) -> None:
        """Reports `count` more bytes."""
        with self._lock:
            self._move(self._done + count)

    def expect(self, total: int) -> None:
        """Says how many bytes `add` will report, about."""
        self._total = total

    def say(self, line: str) -> None:
        """Prints a line on stdout, above the bar."""
        with self._lock:
            if self._bar is not None:
                sys.stderr.write("\r\x1b[K")
            say(line)

    def _move(self, done: int) -> None:
        if not self._shown or self._total <= 0:
            return
        if self._bar is None:
            self._bar = click.progressbar(length=self._total, label=self._label, file=sys.stderr, item_show_func=self._position)
            self._bar.render_progress()
        self._done = min(max(done, self._done), self._total)
        self._bar.update(self._done - self._bar.pos)

    def _position(self, _: object) -> str:
        return f"{human_bytes(self._done)} of {human_bytes(self._total)}"


class Phases:
    """A line that says what is being done, and how far; nothing where that is no terminal. A context manager."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self._shown = stream.isatty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._stream.write("\r\x1b[K")

    def __call__(self, what: str, done: int, total: int) -> None:
        """Reports so many done of so many."""
        if self._shown and total > 0:
            with self._lock:
                self._stream.write(f"\r{what}: {done / total:.0%}\x1b[K")
                self._stream.flush()


class CountingBackend:
    """A backend that tells a bar how many bytes of blocks went through it; everything else is the backend's own."""

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

"""stdout and stderr of `tsck`, which may be closed, full, a pipe that nobody reads, or unable to show some characters.

A command does its work even if its output is lost; where output was lost, it then exits with an error, quietly if a reader stopped. A
closed stream wants none. Characters that a stream cannot encode are escaped.
"""

import io
import os
import sys
from typing import Any, TextIO


class _Writer(io.RawIOBase):
    """Writes to a descriptor, and never raises."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._is_over = False
        self.failure: OSError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, data: Any) -> int:
        if not self._is_over:
            try:
                return os.write(self._fd, data)
            except OSError as exc:
                self._is_over, self.failure = True, exc
        return len(data)


def prepare() -> "_Writer | None":
    """Replaces the process's own streams; returns the one of stdout. A stream that a caller replaced stays as it is."""
    _reserve_descriptors()
    writer = None
    if sys.stdout is sys.__stdout__:
        writer, sys.stdout = _replaced(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        _, sys.stderr = _replaced(sys.stderr, 2)
    return writer


def lost_output(writer: _Writer | None) -> OSError | None:
    """Why output could not be written; None if all of it was."""
    if writer is None:
        return None
    sys.stdout.flush()
    return writer.failure


def shows_colours() -> bool:
    """Whether the user and the terminal want them (see no-color.org)."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _replaced(stream: TextIO | None, fd: int) -> tuple[_Writer, TextIO]:
    encoding, is_line_buffered = "utf-8", False
    if stream is not None:
        fd, encoding, is_line_buffered = stream.fileno(), stream.encoding, stream.isatty()
    writer = _Writer(fd)
    return writer, io.TextIOWrapper(io.BufferedWriter(writer), encoding, "backslashreplace", line_buffering=is_line_buffered)


def _reserve_descriptors() -> None:
    """Opens those of the first three descriptors that are closed. Otherwise a store's file could get such a number, and a library could
    print into it.
    """
    fd = os.open(os.devnull, os.O_RDWR)
    while fd <= 2:
        os.set_inheritable(fd, True)
        fd = os.open(os.devnull, os.O_RDWR)
    os.close(fd)

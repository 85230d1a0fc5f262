"""`ProgressLine`: one line on a terminal that shows the current save, and a line for each save that ended. Prints nothing if the stream is
not a terminal.

Polls the saves in flight, and subscribes to events. One daemon thread writes, so that a terminal that is stopped (Ctrl-S) or gone never
holds up a save.
"""

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Protocol, Self, TextIO

from tensorstore_ck.common.save_progress import Progress
from tensorstore_ck.common.threads import Helper
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.events import Event, Observed, event_text
from tensorstore_ck.redaction import one_line

PERIOD_SECONDS: Final = 0.2
STOP_SECONDS: Final = 1.0
"""How long `stop` waits for a terminal that takes no output."""
BAR_CELLS: Final = 10
_MIN_NAME: Final = 10
_BAR_COLUMNS: Final = 30
"""Cells for stage, bar and percentage, which a long name does not take."""
_CLEAR: Final = "\r\x1b[K"


class InFlight(Protocol):
    """A save that has not ended."""

    @property
    def ref(self) -> str: ...  # noqa: D102
    @property
    def step(self) -> int | None: ...  # noqa: D102
    def progress(self) -> Progress: ...  # noqa: D102


class ObservedStore(Observed, Protocol):
    """The part of a `Store` that is used here."""

    def pending(self) -> Sequence[InFlight]:
        """The saves in flight, oldest first."""


@short_errors
class ProgressLine:
    """Shows the saves of `store` on a terminal. A context manager around the training; use it on one rank.

    Example:
        ``with tsck.ProgressLine(store): train()``
    """

    def __init__(self, store: ObservedStore, stream: TextIO | None = None) -> None:
        """`stream` is stderr by default; if it is no terminal, nothing is shown."""
        self._store = store
        self._stream = stream if stream is not None else sys.stderr
        self._shown = self._stream.isatty()
        self._ended: deque[str] = deque()
        """Lines to print, for saves that ended."""
        self._drawn = ""
        self._stopping = Flag()
        self._thread: threading.Thread | None = None
        self._unsubscribe: Callable[[], None] = lambda: None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Starts the thread that draws."""
        if self._thread is None and self._shown:
            self._stopping.clear()
            self._unsubscribe = self._store.on_event(self._note)
            self._thread = Helper(self._run, "tsck-progress")
            self._thread.start()

    def stop(self) -> None:
        """Prints a line for each save that ended since, and removes the progress line."""
        if self._thread is not None:
            self._unsubscribe()
            self._stopping.set()
            self._thread.join(STOP_SECONDS)
            self._thread = None

    def draw(self) -> None:
        """Draws the line; the thread does this five times a second."""
        if self._shown:
            self._show(_line(self._store.pending(), _columns(self._stream)))

    def _run(self) -> None:
        while self._shown and not self._stopping.is_set():
            self.draw()
            self._stopping.wait(PERIOD_SECONDS)
        if self._shown:
            self._show("")

    def _note(self, event: Event) -> None:
        if event.kind in ("published", "failed", "dropped"):
            self._ended.append(event_text(event))

    def _show(self, line: str) -> None:
        line = line[: _columns(self._stream) - 1]
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        if not ended and line == self._drawn:
            return
        try:
            self._stream.write(_CLEAR + "".join(f"{text}\n" for text in ended) + line)
            self._stream.flush()
        except (OSError, ValueError):
            self._shown = False  # the terminal is gone, or closed: a job goes on without it
        self._drawn = line


def _line(pending: Sequence[InFlight], columns: int) -> str:
    """The line of the newest save that has left the queue; the others are only counted. A long name is cut before the bar is, and parts
    that do not fit are left out.
    """
    if not pending:
        return ""
    progress = [save.progress() for save in pending]
    at = max((at for at, course in enumerate(progress) if course.stage != "queued"), default=len(pending) - 1)
    put, now = pending[at], progress[at]
    name, width = (
        one_line(put.ref if put.step is None else f"{put.ref}@{put.step}"),
        max(min(columns // 2, columns - _BAR_COLUMNS), _MIN_NAME),
    )
    parts = [name if len(name) <= width else f"…{name[1 - width :]}", f"{now.stage:7}"]
    if now.total_bytes:
        full = int(BAR_CELLS * now.fraction)
        parts.append(f"[{'#' * full}{'-' * (BAR_CELLS - full)}] {now.fraction:4.0%}")
    if len(pending) > 1:
        parts.append(f"{len(pending)} in flight")
    if now.total_bytes:  # last, since a narrow terminal cuts it off
        parts.append(f"{human_bytes(now.done_bytes)} of {human_bytes(now.total_bytes)}, {human_bytes(int(now.bytes_per_second))}/s")
    line = parts[0]
    for part in parts[1:]:
        if len(line) + len(part) + 2 >= columns:
            break
        line += f"  {part}"
    return line.rstrip()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80

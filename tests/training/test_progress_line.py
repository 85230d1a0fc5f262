"""The line on a terminal: what it shows of saves in flight and of those that ended, and that it delays nothing."""

import fcntl
import io
import pty
import struct
import termios
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from tensorstore_ck.common.save_progress import STAGES, Progress
from tensorstore_ck.events import Event, Observers
from tensorstore_ck.training.progress_line import ProgressLine
from tests.effort import PATIENCE_SECONDS

CLEAR = "\r\x1b[K"
MIB = 1 << 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Put(NamedTuple):
    ref: str
    step: int | None
    now: Progress

    def progress(self) -> Progress:
        return self.now


class FakeStore:
    """What a `ProgressLine` sees of a store."""

    def __init__(self, *puts: Put) -> None:
        self.observers = Observers()
        self.puts = list(puts)
        self.asked = threading.Semaphore(0)

    def on_event(self, callback: Callable[[Event], object]) -> Callable[[], None]:
        return self.observers.subscribe(callback)

    def pending(self) -> list[Put]:
        self.asked.release()
        return self.puts


def progress(stage: Any, done_bytes: int = 0, total_bytes: int = 0, rate: float = 0.0) -> Progress:
    return Progress(stage, done_bytes, total_bytes, rate, dict.fromkeys(STAGES, 0.0), dict.fromkeys(STAGES, 0))


def drawn(*puts: Put) -> str:
    terminal = Terminal()
    ProgressLine(FakeStore(*puts), terminal).draw()
    return terminal.getvalue()


def dropped(ref: str) -> Event:
    return Event("dropped", "", ref, 7, 0, 0, {"reason": "skipped"})


SAID = CLEAR + "dropped runs/gpt@7: no memory was free for it\n"


def test_the_line() -> None:
    """A long name loses its beginning, and what does not fit is left out; there is no bar where nothing is known."""
    half, upload, queued, long_name = progress("hash", 5, 10, 1.0), progress("upload"), progress("queued"), "a-long-name" * 5
    for puts, line in (
        (
            [Put("runs/gpt", 1000, progress("write", 300 * MIB, 1200 * MIB, 150.0 * MIB))],
            "runs/gpt@1000  write    [##--------]  25%  300.0 MiB of 1.2 GiB, 150.0 MiB/s",
        ),
        ([Put(long_name, 12, half), Put("gpt", None, queued)], "…" + f"{long_name}@12"[-39:] + "  hash     [#####-----]  50%"),
        ([Put("gpt", 1, progress("capture"))], "gpt@1  capture"),
    ):
        assert drawn(*puts) == CLEAR + line
    assert "gpt@2  upload   3 in flight" in drawn(Put("gpt", 1, progress("commit")), Put("gpt", 2, upload), Put("gpt", 3, queued))
    assert "gpt@2  queued   2 in flight" in drawn(Put("gpt", 1, queued), Put("gpt", 2, queued))
    assert "\x1b" not in drawn(Put("a\x1b[2Jb", 1, progress("hash"))).removeprefix(CLEAR)


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_on_a_real_terminal_it_fits_and_shows_the_percentage(columns: int) -> None:
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with open(child, "w", encoding="utf-8") as stream, open(terminal, "rb", buffering=0) as shown:
        put = Put("runs/" + "long-name" * 20, 123, progress("write", 300 * MIB, 1200 * MIB, 150.0 * MIB))
        ProgressLine(FakeStore(put, put), stream).draw()
        line = shown.read(4096).decode().removeprefix(CLEAR)
    assert line.startswith("…")
    assert "@123  write    [##--------]  25%" in line
    assert len(line) < columns


def test_it_is_redrawn_when_something_changed_and_taken_away_at_the_end() -> None:
    store, terminal = FakeStore(Put("gpt", 1, progress("hash"))), Terminal()
    line = ProgressLine(store, terminal)
    line.draw()
    first = terminal.getvalue()
    line.draw()
    assert terminal.getvalue() == first
    store.puts = []
    line.draw()
    assert terminal.getvalue() == first + CLEAR


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end waits for the thread, however slow the machine is."""
    monkeypatch.setattr("tensorstore_ck.training.progress_line.STOP_SECONDS", PATIENCE_SECONDS)


@pytest.mark.usefixtures("patient")
def test_its_thread_draws_and_says_what_ended_and_ends_with_it() -> None:
    store, terminal = FakeStore(Put("gpt", 1, progress("hash"))), Terminal()
    line = ProgressLine(store, terminal)
    with line:
        for _ in range(2):
            assert store.asked.acquire(timeout=PATIENCE_SECONDS)
        store.observers.emit(Event("stalled", "", "r", 1, 0, 0, {"stall_seconds": 1.0, "queue_depth": 1}))
        store.observers.emit(dropped("runs/gpt"))
        store.observers.emit(dropped("runs/gpt"))
    assert terminal.getvalue().startswith(CLEAR + "gpt@1  hash")
    assert terminal.getvalue().count(SAID.removeprefix(CLEAR)) == 2
    assert "waited" not in terminal.getvalue()
    assert terminal.getvalue().endswith((CLEAR, SAID.removeprefix(CLEAR))), "nothing of the line stays behind"
    assert not [thread for thread in threading.enumerate() if thread.name == "tsck-progress"]
    store.observers.emit(dropped("between"))
    with line:
        store.observers.emit(dropped("again"))
    assert "dropped again@7" in terminal.getvalue()
    assert "between" not in terminal.getvalue()


def test_nothing_is_shown_where_that_is_no_terminal() -> None:
    store, stream = FakeStore(Put("gpt", 1, progress("hash"))), io.StringIO()
    with ProgressLine(store, stream) as line:
        store.observers.emit(dropped("r"))
        line.draw()
    assert stream.getvalue() == ""
    assert not store.asked.acquire(blocking=False), "nor is the store asked"


@pytest.mark.parametrize("error", [OSError("gone"), ValueError("I/O operation on closed file")])
def test_a_terminal_that_is_gone_is_given_up(error: Exception) -> None:
    class Gone(Terminal):
        tries = 0

        def write(self, _: str) -> int:
            Gone.tries += 1
            raise error

    store = FakeStore(Put("gpt", 1, progress("hash")))
    line = ProgressLine(store, Gone())
    line.draw()
    line.draw()
    with line:
        store.observers.emit(dropped("r"))
    assert Gone.tries == 1


def test_a_terminal_that_takes_nothing_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.training.progress_line.STOP_SECONDS", 0.01)
    stopped, writing = threading.Event(), threading.Event()

    class Stopped(Terminal):
        def write(self, text: str) -> int:
            writing.set()
            assert stopped.wait(PATIENCE_SECONDS)
            return len(text)

    store = FakeStore(Put("gpt", 1, progress("hash")))
    with ProgressLine(store, Stopped()):
        assert writing.wait(PATIENCE_SECONDS)
        store.observers.emit(dropped("r"))  # returns
    stopped.set()
    for thread in threading.enumerate():
        if thread.name == "tsck-progress":
            thread.join(PATIENCE_SECONDS)

"""Ctrl-C at a line of the package in the main thread, as CPython delivers it.

The signal is pending when the line begins, and its handler runs where the interpreter next looks: when a call in C returns, a function
begins or a loop goes round. Raised by the trace function itself, it would come in places where it never does, such as between the end of a
`with` block and the release of its lock.
"""

import _thread
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any, Final

import tensorstore_ck

PACKAGE: Final = os.path.dirname(tensorstore_ck.__file__) + os.sep


class Interruption:
    """Lets the signal come at the `at`-th line, counted from 1; 0: never. `lines` counts those that ran."""

    def __init__(self, at: int) -> None:
        self.lines = 0
        self.where = ""
        self._at = at

    def run(self, action: Callable[[], object]) -> None:
        """Runs `action` under it."""
        assert threading.current_thread() is threading.main_thread()
        former = signal.signal(signal.SIGINT, self._handle)
        try:
            with suppress(KeyboardInterrupt):
                sys.settrace(self._trace)
                action()
                sys.settrace(None)  # a call, after which a signal that is still pending comes
        finally:
            sys.settrace(None)
            signal.signal(signal.SIGINT, former)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        self.lines += event == "line"
        if event != "line" or self.lines != self._at:  # at other events 3.11 can make a TypeError of an exception that is under way
            return self._trace
        self.where = f"{frame.f_code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno}"
        sys.settrace(None)
        pending = map(_thread.interrupt_main, (signal.SIGINT,))
        _ = [*pending]  # no call, after which the interpreter would look for signals here
        return None

    @staticmethod
    def _handle(*_: object) -> None:
        raise KeyboardInterrupt


def interrupted(action: Callable[[], object], at: int) -> Interruption:
    """Runs `action` with Ctrl-C at the `at`-th line; says where that was."""
    interruption = Interruption(at)
    interruption.run(action)
    return interruption

"""Kills a process with -9 at a call of the backend."""

import os
import signal
from collections.abc import Callable
from typing import Any

from tests.end_to_end.crash.faulty import Faults


class KillAt(Faults):
    """Kills the process at a call, counted while `is_counting`."""

    def __init__(self, at: int = 0, *, torn: bool = False) -> None:
        super().__init__()
        self._at, self._torn, self.is_counting = at, torn, False

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if self.is_counting:
            self.calls += 1
            if self.calls == self._at:
                if self._torn and tear is not None:
                    tear()
                os.kill(os.getpid(), signal.SIGKILL)
        return effect()

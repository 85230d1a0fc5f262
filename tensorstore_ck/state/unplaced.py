"""Positions of a restore's target that the snapshot does not have under their keys: they are matched by name after all others."""

from collections import deque
from collections.abc import Callable
from typing import Any


class Later:
    """A position for which `finish` is planned later; till then it stays as it is."""

    __slots__ = ("depth", "finish", "path", "target")

    def __init__(self, target: Any, path: str, depth: int) -> None:
        self.target = target
        self.path = path
        self.depth = depth
        self.finish: Callable[[], Any] | None = None

    def __call__(self) -> Any:
        """Puts its value in place."""
        return self.target if self.finish is None else self.finish()


class Unplaced:
    """Such positions, in the order of the target. Empty containers come last: they take what is left."""

    def __init__(self) -> None:
        self._filled: list[Later] = []
        self._empty: deque[Later] = deque()

    def add(self, later: Later) -> Later:
        """Adds a position."""
        is_empty = isinstance(later.target, dict | list | tuple) and not later.target
        (self._empty if is_empty else self._filled).append(later)
        return later

    def place(self, plan: Callable[[Later], None]) -> None:
        """Plans for all, and what `plan` adds. Depth-first: a target that contains itself is soon too deep."""
        pending = self._filled[::-1]
        while pending or self._empty:
            later, self._filled = pending.pop() if pending else self._empty.popleft(), []
            plan(later)
            pending += reversed(self._filled)

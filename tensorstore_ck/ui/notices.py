"""The outcomes of actions, for the pages that they redirect to. A URL has only the number of an outcome, so outcomes cannot be forged."""

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from starlette.requests import Request

KEPT: Final = 100
_KEY: Final = "tsck.outcome"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an action."""

    verb: str
    text: str
    is_error: bool
    form: Mapping[str, str] = field(default_factory=dict)
    """The form that was sent."""


class Notices:
    """The outcomes that no page has shown yet. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[str, Outcome] = {}
        self._lock = threading.Lock()
        self._shown: ContextVar[Outcome | None] = ContextVar("shown", default=None)

    def add(self, outcome: Outcome) -> str:
        """Keeps an outcome; returns its number."""
        number = secrets.token_urlsafe(12)
        with self._lock:
            self._waiting[number] = outcome
            if len(self._waiting) > KEPT:
                del self._waiting[next(iter(self._waiting))]
        return number

    @contextmanager
    def showing(self, request: Request) -> Iterator[None]:
        """`current` is the outcome whose number is in the request, for this request alone."""
        with self._lock:
            outcome = request.scope.setdefault(_KEY, self._waiting.pop(request.query_params.get("notice", ""), None))
        token = self._shown.set(outcome)
        try:
            yield
        finally:
            self._shown.reset(token)

    def current(self) -> Outcome | None:
        """The outcome that the page of this thread shows."""
        return self._shown.get()

    def failed(self, verb: str, name: str) -> str:
        """The text sent as `name` to the action that failed, to be corrected; empty if none did."""
        outcome = self.current()
        return outcome.form.get(name, "") if outcome is not None and outcome.is_error and outcome.verb == verb else ""

"""The common parts of all pages: templates, the stores behind them, links, numbers as text, outcomes of actions.

An action redirects to a page that shows its outcome. A URL has only the number of an outcome, so outcomes cannot be forged.
"""

import math
import re
import secrets
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from tensorstore_ck.common.ids import SHOWN_ROOT_DIGITS
from tensorstore_ck.common.prices import NO_PRICES, Prices, usd_text
from tensorstore_ck.common.units import human_bytes, iso_time
from tensorstore_ck.errors import NotFoundError
from tensorstore_ck.ui.security import Access
from tensorstore_ck.ui.sources import Sources, StoreKey

if TYPE_CHECKING:
    from tensorstore_ck.store import OpenOptions

MAX_PAGE_DIGITS: Final = 9
_COMMAND: Final = re.compile(r"`(tsck (?:(?! -s )[^`])*)`")
"""A command in a text that does not name its store."""


KEPT: Final = 100
_KEY: Final = "tsck.outcome"


_UNITS: Final = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
NONE: Final = "\N{EN DASH}"


def time_text(time_ns: int | None) -> str:
    """``2026-01-31 12:00:00``, in UTC; a dash for None."""
    return NONE if time_ns is None else iso_time(time_ns).replace("T", " ").removesuffix("Z")


def duration_text(duration_ns: int) -> str:
    """``12 s``, ``5 min``, ``3 h``, ``2 d``; of a time in the future, ``0 s``."""
    seconds = max(0, duration_ns) // 1_000_000_000
    size, unit = next((item for item in _UNITS if seconds >= 2 * item[0]), _UNITS[-1])
    return f"{seconds // size:,} {unit}"


def count_text(count: int | None) -> str:
    """``1,234``; a dash for None."""
    return NONE if count is None else f"{count:,}"


def number_text(number: float | None) -> str:
    """Six significant digits; a dash for None."""
    if number is None:
        return NONE
    return f"{number:.6g}" if math.isfinite(number) else str(number)


def root_text(root: str) -> str:
    """The digits of a root that are enough to find it again."""
    return root[:SHOWN_ROOT_DIGITS]


def commands_html(text: str) -> Markup:
    """A text with commands in backticks, which become code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704 - it is escaped


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


class Pages:
    """Renders pages of `sources`. A page of one store has its uuid in the path parameter ``store``."""

    def __init__(
        self,
        sources: Sources,
        access: Access,
        complete: Callable[[str], str] = str,
        open_options: "OpenOptions | None" = None,
        prices: Prices = NO_PRICES,
    ) -> None:
        """Args:
        sources: The stores.
        access: Who may see them.
        complete: Adds the options that a command in a text needs to reach its store.
        open_options: What `tensorstore_ck.open` needs to reach the stores, without secrets.
        prices: What the locations of stores cost.
        """
        self.prices = prices
        self.sources = sources
        self.open_options: OpenOptions = open_options or {}
        self.access = access
        self.notices = Notices()
        self._complete = complete
        self._environment = Environment(
            loader=PackageLoader("tensorstore_ck.ui"), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        self._environment.filters |= {
            "bytes": human_bytes,
            "commands": commands_html,
            "count": count_text,
            "usd": usd_text,
            "duration": duration_text,
            "number": number_text,
            "root": root_text,
            "time": time_text,
        }
        self._environment.globals |= {
            "prefix": access.prefix,
            "link": self.link,
            "trouble": self.sources.trouble,
            "command": self.command,
            "completed": self.completed,
            "allow": access.allow,
            "csrf": access.csrf,
            "outcome": self.notices.current,
            "failed": self.notices.failed,
            "store": None,
            "here": "",
        }

    def link(self, name: str, store: StoreKey | str = "", /, **query: object) -> str:
        """The URL of a page: of all stores if `store` is empty, else of the store with this uuid.

        None in `query` is left out, and a list repeats its name.
        """
        uuid = store.uuid if isinstance(store, StoreKey) else store
        path = f"/stores/{quote(uuid, safe='')}/{name}" if uuid else f"/{name}"
        asked = urlencode({key: value for key, value in query.items() if value is not None}, doseq=True)
        return f"{self.access.prefix}{path}{'?' if asked else ''}{asked}"

    def command(self, store: StoreKey, *words: str) -> str:
        """A `tsck` command that works on this store as it is printed."""
        return self.completed(store, f"`{shlex.join(['tsck', *words])}`")[1:-1]

    def completed(self, store: StoreKey, text: str) -> str:
        """A text of the store, with the store added to the commands in it."""
        return self._complete(_COMMAND.sub(lambda match: f"`{match[1]} -s {shlex.quote(store.url)}`", text))

    def render(self, template: str, here: str, status: int = 200, **values: Any) -> Response:
        """A page. `here` is its name in the navigation; `store=`, a `StoreKey`, adds the navigation of that store."""
        return HTMLResponse(self._environment.get_template(template).render({"here": here, **values}), status)

    def part(self, template: str, **values: Any) -> Response:
        """A piece of a page, for htmx to insert."""
        return HTMLResponse(self._environment.get_template(template).render(values))

    def store_of(self, request: Request) -> StoreKey:
        """The store that a request's path names. Reads its new log entries first.

        Raises:
            NotFoundError: the catalog has no such store.
        """
        uuid = request.path_params["store"]
        self.sources.refresh(uuid)
        return self.sources.key(uuid)

    def error(self, request: Request, exc: Exception) -> Response:
        """The page that says why another one cannot be shown."""
        with self.notices.showing(request):
            return self._error(exc)

    def _error(self, exc: Exception) -> Response:
        if isinstance(exc, HTTPException):
            return self.render("error.html", "", exc.status_code, title=HTTPStatus(exc.status_code).phrase, message=exc.detail)
        status = 404 if isinstance(exc, NotFoundError) else 503
        return self.render("error.html", "", status, title="This page cannot be shown", message=str(exc))


def asked(query: Mapping[str, str], name: str) -> str:
    """A parameter of the query that a page needs. Raises `HTTPException` if it is missing."""
    value = query.get(name, "")
    if not value:
        raise HTTPException(400, f"The address of this page lacks {name}=: start from the overview.")
    return value


def page_number(query: Mapping[str, str]) -> int:
    """Which page of a long list: ``page=``, from 1 on; 1 if it is not a number."""
    text = query.get("page", "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) <= MAX_PAGE_DIGITS else 1

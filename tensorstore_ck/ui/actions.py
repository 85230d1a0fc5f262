"""The changes that pages may make, if `tsck ui --allow` says so: tags, metrics, marks, pins, and undo. Nothing here frees or repairs."""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import parse_qsl

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from tensorstore_ck.errors import InvalidOptionError, StoreError, UndecidedError
from tensorstore_ck.store import Store
from tensorstore_ck.ui.pages import Outcome, Pages, asked

MAX_BODY_BYTES: Final = 1 << 16
MAX_FIELDS: Final = 20
MAX_FORM_CHARS: Final = 1000
"""The most characters of a field."""

Form = Mapping[str, str]
Action = Callable[[Store, Form], str]
"""Performs the action; returns a text of what it did."""


def _tag(store: Store, form: Form) -> str:
    name = asked(form, "name")
    store.tag(name, asked(form, "at"))
    return f"The tag {name} names this snapshot now."


def _annotate(store: Store, form: Form) -> str:
    name, text = asked(form, "name"), form.get("value", "")
    try:
        value = float(text)
    except ValueError:
        raise InvalidOptionError(f"the value of a metric is a number, not {text!r}", object_id=name) from None
    store.annotate(asked(form, "at"), {name: value})
    return f"The metric {name} is {value:g} now."


def _mark(store: Store, form: Form) -> str:
    mark = form.get("mark", "")
    store.mark(asked(form, "at"), mark, reason=form.get("reason", "") if mark else "")
    return "This snapshot is marked bad now: a checkout refuses it." if mark else "This snapshot has no mark any more."


def _pin(store: Store, form: Form) -> str:
    expires = form.get("expires", "") or None
    store.pin(asked(form, "at"), reason=form.get("reason", ""), expires=expires)
    return f"This snapshot is pinned{f' for {expires}' if expires else ''}."


def _undo(store: Store, form: Form) -> str:
    name, entry = asked(form, "name"), asked(form, "entry")
    if not entry.isdecimal() or len(entry) > 18:
        raise InvalidOptionError("the number of a log entry is a whole number", object_id="entry")
    done = store.undo(name, entry=int(entry))
    count = sum(len(window.snapshots) for window in done)
    return f"{count:,} snapshot{'s' if count != 1 else ''} of {name} {'are' if count != 1 else 'is'} back."


ACTIONS: Final[Mapping[str, Action]] = {"tag": _tag, "annotate": _annotate, "mark": _mark, "pin": _pin, "undo": _undo}


def parse_allow(text: str) -> frozenset[str]:
    """``tag,pin`` -> names of actions. Raises `InvalidOptionError` if one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in ACTIONS:
            raise InvalidOptionError(f"pages cannot be allowed to {name!r}: allowed are {', '.join(ACTIONS)}", object_id="allow")
    return frozenset(names)


def answer(pages: Pages, verb: str) -> Callable[[Request], Awaitable[Response]]:
    """The route of an action."""

    async def act(request: Request) -> Response:
        return await run_in_threadpool(_act, pages, verb, request.path_params["store"], await _form(request))

    return act


def _act(pages: Pages, verb: str, uuid: str, form: Form) -> Response:
    if not pages.access.is_csrf(form.get("csrf", "")):
        raise HTTPException(403, "This form is not of this server, or of an earlier one: load the page again.")
    store = pages.sources.key(uuid)
    where = {"at": asked(form, "at")} if verb != "undo" else {"name": asked(form, "name")}
    page = "snapshot" if verb != "undo" else "ref" if form.get("back") == "ref" else "forgotten"
    try:
        outcome = Outcome(verb, ACTIONS[verb](pages.sources.writable(store), form), is_error=False)
    except StoreError as exc:
        what = "It is not known whether this was done" if isinstance(exc, UndecidedError) else "Nothing was changed"
        outcome = Outcome(verb, f"{what}: {pages.completed(store, str(exc))}", is_error=True, form=form)
    return RedirectResponse(pages.link(page, store, **where, notice=pages.notices.add(outcome)), 303)


async def _form(request: Request) -> Form:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
        raise HTTPException(415, "This is not a form.")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, "This form is too long.")
    try:
        form = dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS))
    except ValueError:
        raise HTTPException(400, "This form cannot be read.") from None
    if any(len(value) > MAX_FORM_CHARS for value in form.values()):
        raise HTTPException(400, f"A field is longer than {MAX_FORM_CHARS:,} characters.")
    return {name: value.strip() for name, value in form.items()}

"""A server without ``--allow`` sends no write to a store, whatever is asked of any of its pages."""

import threading
from collections.abc import Callable, Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
import torch
from starlette.testclient import TestClient

from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.cold.locations import LocationOpener
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.store import Store
from tensorstore_ck.ui import Sources, make_app
from tests.effort import PATIENCE_SECONDS
from tests.ui.conftest import ACCESS, BASE, enter

WRITES: Final = ("put", "replace", "create", "sync_folders", "open_writer", "open_whole_writer", "delete", "abort_upload")
MAX_PAGES: Final = 400
Queries = Callable[[Mapping[str, str]], list[dict[str, str]]]
"""What to ask of a page, by what the store has: ``root``, ``old``, ``ref``, ``tensor``."""

ASKED: Final[dict[str, Queries]] = {
    "/": lambda _: [{}],
    "/find": lambda _: [{}, {"q": "loss < 2", "order": "loss", "descending": "yes", "state": "live"}, {"q": "loss <"}],
    "/runs": lambda has: [{}, {"run": has["ref"], "metric": "loss"}],
    "/activity": lambda has: [{}, {"ref": has["ref"], "op": "put"}],
    "/static": lambda _: [],
    "/stores/{store}/ref": lambda has: [
        {"name": has["ref"]},
        {"name": has["ref"], "metric": "loss", "kept": "yes", "state": "live"},
        {"name": "runs/gone"},
        {"name": "kept"},
    ],
    "/stores/{store}/ref/series": lambda has: [{"name": has["ref"], "metric": "loss"}],
    "/stores/{store}/addresses": lambda has: [{"of": "at", "at": has["root"][:4]}, {"of": "at", "at": "runs"}],
    "/stores/{store}/compare": lambda has: [{}, {"old": has["old"], "new": has["root"]}],
    "/stores/{store}/compare/changes": lambda has: [{"old": has["old"], "new": has["root"]}],
    "/stores/{store}/compare/tensors": lambda has: [{"old": has["old"], "new": has["root"], "q": "w"}],
    "/stores/{store}/snapshot": lambda has: [{}, {"at": has["root"]}, {"at": has["old"]}, {"at": "runs/a~1"}],
    "/stores/{store}/snapshot/kept": lambda has: [{"at": has["root"]}, {"at": has["old"]}],
    "/stores/{store}/snapshot/statistics": lambda has: [{"at": has["root"], "tensor": has["tensor"]}, {"at": has["root"], "group": ""}],
    "/stores/{store}/snapshot/tensors": lambda has: [{"at": has["root"]}, {"at": has["root"], "q": "w"}],
    "/stores/{store}/snapshot/values": lambda has: [{"at": has["root"], "q": "name"}],
    "/stores/{store}/snapshot/value": lambda has: [{"at": has["root"], "path": "name"}, {"at": has["root"], "metadata": "a"}],
    "/stores/{store}/space": lambda _: [
        {},
        {"measure": "yes"},
        {"branches": "runs/*", "keep_last": "1", "max_bytes": "1kB"},
        {"branches": "runs/*", "keep_last": "x"},
    ],
    "/stores/{store}/health": lambda _: [{}, {"check": "yes"}],
    "/stores/{store}/forgotten": lambda has: [{}, {"name": has["ref"], "back": "ref"}],
}
"""Each route of the application, and queries for it: a page without a line here fails the test below."""


class Counting:
    """A backend that notes what reaches it."""

    def __init__(self, inner: Backend, calls: list[tuple[str, object]]) -> None:
        self._inner, self._calls = inner, calls

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((name, args[0] if args else None))
            return found(*args, **kwargs)

        return noted


class Links(HTMLParser):
    """The URLs that a page leads to: links, what htmx fetches, and forms with their values as they are."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self._form: str | None = None
        self._fields: list[tuple[str, str]] = []
        self._buttons: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        has = {name: value or "" for name, value in attrs}
        self.found += [has[name] for name in ("hx-get", "href") if name in has and tag not in ("link", "form")]
        if tag == "form":
            assert has.get("method", "get") == "get", has["action"]
            self._form, self._fields, self._buttons = has["action"], [], []
        elif tag in ("input", "select", "button") and has.get("name"):
            (self._buttons if tag == "button" else self._fields).append((has["name"], has.get("value", "")))

    def handle_endtag(self, tag: str) -> None:
        if tag == "form" and self._form is not None:
            sent = [[*self._fields, button] for button in self._buttons] or [self._fields]
            self.found += [f"{urlsplit(self._form).path}?{urlencode(each)}" for each in sent]
            self._form = None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """What reaches the backends that are opened from now on."""
    noted: list[tuple[str, object]] = []
    real, real_location = open_backend, LocationOpener.__call__
    monkeypatch.setattr("tensorstore_ck.engine.opening.open_backend", lambda *args, **kwargs: Counting(real(*args, **kwargs), noted))
    monkeypatch.setattr(LocationOpener, "__call__", lambda self, url: Counting(real_location(self, url), noted))
    return noted


@pytest.fixture
def has(store: Store, tmp_path: Path) -> dict[str, str]:
    """Fills the store with one of everything that pages show."""
    state: dict[str, Any] = {"w": torch.arange(20_000, dtype=torch.float32), "lr": 0.1, "name": "</script><script>"}
    old = store.put_snapshot(state, ref="runs/a", step=1, metrics={"loss": 1.0}).root
    state["w"] = state["w"] + 1
    root = store.put_snapshot(state, ref="runs/a", step=2, metrics={"loss": float("nan")}, metadata={"a": [1, 2]}).root
    store.put_snapshot(state, ref="runs/gone", step=1)
    store.branch("other", old)
    store.tag("kept", old)
    store.pin(root, reason="why")
    store.mark(old, reason="bad luck")
    store.annotate(root, {"noted": 2.0})
    store.set_policy("runs/*", keep_last=5, move_after=("1s", str(tmp_path / "cold")))
    real = store.engine.clock
    store.engine.clock = lambda: real() + 10**12
    store.migrate_tiers()
    store.engine.clock = real
    store.forget("runs/gone")
    return {"root": root, "old": old, "ref": "runs/a", "tensor": "w"}


def route_paths(browser: TestClient) -> set[str]:
    return {route.path.rstrip("/") or "/" for route in browser.app._app.routes}  # type: ignore[attr-defined]


def pages_of(store: Store, has: Mapping[str, str]) -> Iterator[str]:
    for path, queries in ASKED.items():
        for query in queries(has):
            yield path.format(store=store.engine.config.uuid) + (f"?{urlencode(query)}" if query else "")


def wait_for_reads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("tsck-ui"):
            thread.join(PATIENCE_SECONDS)


def test_no_write_reaches_a_backend(
    sources: Callable[..., Sources], store: Store, has: dict[str, str], calls: list[tuple[str, object]]
) -> None:
    before = {path: path.read_bytes() for path in Path(store.url).rglob("*") if path.is_file()}
    browser = enter(TestClient(make_app(sources(), ACCESS), base_url=BASE))
    assert route_paths(browser) == ASKED.keys(), "add a line to ASKED for each new page"
    asked = list(pages_of(store, has))
    queue, seen = list(asked), set[str]()
    while queue and len(seen) < MAX_PAGES:
        url = queue.pop(0)
        if url in seen:
            continue
        seen.add(url)
        answer = browser.get(url)
        assert answer.status_code == 200 or (answer.status_code == 404 and (url not in asked or answer.history)), (url, answer.text)
        assert "was opened with read_only=True" not in answer.text, url  # nothing was even tried
        if answer.headers["content-type"].startswith("text/html"):
            here = urlsplit(str(answer.url))
            for link in Links(answer.text).found:
                parts = urlsplit(link)
                if not parts.scheme and not link.startswith("#"):
                    path = f"{parts.path or here.path}{'?' if parts.query else ''}{parts.query}"
                    queue.append(path)
    wait_for_reads()
    assert {name for name, _ in calls} & {"get", "list", "read_into"}
    assert [call for call in calls if call[0] in WRITES] == []
    assert {path: path.read_bytes() for path in Path(store.url).rglob("*") if path.is_file()} == before
    assert any("measure=yes" in url for url in seen)
    assert any(dict(parse_qsl(urlsplit(url).query)).get("back") for url in seen)


def test_other_methods_are_refused_everywhere(
    sources: Callable[..., Sources], store: Store, has: dict[str, str], calls: list[tuple[str, object]]
) -> None:
    browser = enter(TestClient(make_app(sources(), ACCESS), base_url=BASE))
    actions = [f"/stores/{store.engine.config.uuid}/do/{verb}" for verb in ("tag", "annotate", "mark", "pin", "undo", "gc", "forget")]
    same_origin = {"origin": BASE, "sec-fetch-site": "same-origin"}
    for url in (*pages_of(store, has), *actions, "/static/style.css", "/open/the-token"):
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "QUERY"):
            assert browser.request(method, url, headers=same_origin, data={"csrf": ACCESS.csrf}).status_code == 405, (method, url)
    assert [call for call in calls if call[0] in WRITES] == []

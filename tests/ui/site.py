"""A server with the stores of `made`, and the paths of all its pages with something on them."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.ui import Access, Sources, make_app, serve
from tests.effort import PATIENCE_SECONDS
from tests.ui.made import EVIL, TRAINING_URL, TrainingStore, nasty_store

OF_ALL: Final[dict[str, list[dict[str, str]]]] = {
    "": [{}],
    "runs": [{}, {"run": "runs/gpt"}, {"run": EVIL}],
    "find": [{"state": ""}, {"q": "val_loss < 3", "order": "val_loss"}, {"q": f"{EVIL} <"}],
    "activity": [{}, {"ref": "runs/gpt", "op": "reset"}],
}
"""Page of all stores -> the queries to look at."""


def is_page(name: str) -> bool:
    """False: what scripts ask for, pieces of pages and data."""
    return "/" not in name and name != "addresses"


def of_a_store(store: ReadOnlyStore) -> dict[str, list[dict[str, str]]]:
    """Page of a store -> the queries to look at."""
    branches = store.branches()
    longest = max(branches, key=len)
    return {
        "ref": [{"name": longest, "kept": "yes"}, {"name": "runs/gpt" if "runs/gpt" in branches else "runs/made"}],
        "snapshot": [{}, {"at": "nothing"}, *({"at": name} for name in sorted(branches))],
        "compare": [{}, {"old": f"{longest}~1", "new": longest}],
        "forgotten": [{}],
        "space": [{}],
        "health": [{}],
    }


@dataclass
class Site:
    """A running server; `problems` are what its pages logged as errors in a browser."""

    url: str
    access: Access
    browser: Any
    stores: dict[str, ReadOnlyStore]
    problems: list[str] = field(default_factory=list)
    contexts: list[Any] = field(default_factory=list)

    def new_page(self, **options: Any) -> Any:
        """Playwright's page of a new window, past the token."""
        context = self.browser.new_context(**options)
        self.contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE_SECONDS * 1000)
        page.on("console", lambda message: self.problems.append(f"{page.url}: {message.text}") if message.type == "error" else None)
        page.on("pageerror", lambda error: self.problems.append(f"{page.url}: {error}"))
        page.goto(f"{self.url}{self.access.entrance}")
        return page

    def go(self, page: Any, path: str) -> None:
        """Opens a page of this server, and waits until its scripts have drawn."""
        answer = page.goto(f"{self.url}{self.access.prefix}{path}", wait_until="load")
        assert answer.status in (200, 400, 404), (path, answer.status)
        self.settle(page)

    def settle(self, page: Any) -> None:
        """Waits for the pieces that a page asks for, and for its charts."""
        page.locator(".htmx-request, [aria-busy=true]").first.wait_for(state="detached")
        page.evaluate("new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame))")

    def paths(self) -> list[str]:
        """Of every page, with both stores."""
        found = [f"/{name}{_query(query)}" for name, queries in OF_ALL.items() for query in queries]
        for store in self.stores.values():
            base = f"/stores/{store.engine.config.uuid}"
            found += [f"{base}/{name}{_query(query)}" for name, queries in of_a_store(store).items() for query in queries]
        return [*found, "/nothing", "/stores/nothing/space"]


def _query(query: dict[str, str]) -> str:
    return f"?{urlencode(query)}" if query else ""


@contextmanager
def serving(browser: Any, folder: Path, alone: TrainingStore | None = None) -> Iterator[Site]:
    """The site, until the end of the block: `alone`, or two stores, in one of which names try to break the pages."""
    training = alone or TrainingStore()
    urls = {"training": TRAINING_URL}
    if alone is None:
        urls["nasty"] = str(folder / EVIL.replace("/", ""))
        with tsck.open(urls["nasty"], create=True, no_sync=True, cache_dir=folder / "cache") as nasty:
            nasty_store(nasty)

    def open_store(url: str) -> ReadOnlyStore:
        options: dict[str, Any] = {"cache_dir": folder / "reader", "state_dir": folder / "state"}
        return training.open() if url == TRAINING_URL else tsck.open(url, read_only=True, **options)

    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        port = listening.getsockname()[1]
        access = Access.of("", port)
        catalog = str(folder / "catalog.sqlite")
        with closing(Sources(catalog, list(urls.values()), open_store, is_private=True, wait_seconds=PATIENCE_SECONDS)) as sources:
            sources.start()
            threading.Thread(target=serve, args=(make_app(sources, access), listening), daemon=True).start()
            with ExitStack() as opened:
                stores = {name: opened.enter_context(open_store(url)) for name, url in urls.items()}
                site = Site(f"http://127.0.0.1:{port}", access, browser, stores)
                try:
                    yield site
                finally:
                    for context in site.contexts:
                        context.close()


@contextmanager
def serving_after_training(browser: Any, folder: Path) -> Iterator[Site]:
    """The site of a store that was saved to four minutes ago, whenever that was."""
    training = TrainingStore()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time_ns", training.clock)
        patch.setitem(Catalog.__init__.__kwdefaults__ or {}, "clock", training.clock)
        with serving(browser, folder, training) as site:
            yield site

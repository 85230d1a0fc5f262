"""Stores, servers and browsers for the pages of `tsck ui`."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import tensorstore_ck as tsck
from tensorstore_ck.store import ReadOnlyStore, Store
from tensorstore_ck.ui import Access, Sources, background, make_app, parse_allow, serve, snapshot_content
from tests.effort import PATIENCE_SECONDS

BASE = "http://127.0.0.1:8080"
ACCESS = Access("", "", False, "tsck_ui_8080", "the-token")
Client = Callable[..., TestClient]
Open = Callable[..., Any]
"""Opens a page of stores in a real browser: ``open_page("/find")`` returns playwright's page, past the token."""


@pytest.fixture(scope="module", autouse=True)
def patient() -> Iterator[None]:
    """A page waits for its reads, however slow the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "PATIENCE_SECONDS", PATIENCE_SECONDS)
        patch.setattr(snapshot_content, "PATIENCE_SECONDS", PATIENCE_SECONDS)
        patch.setattr(snapshot_content, "FIRST_SECONDS", PATIENCE_SECONDS)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def sources(tmp_path: Path, store: Store) -> Iterator[Callable[..., Sources]]:
    """Makes the sources of servers, over the stores at URLs, or over `store`."""
    made: list[Sources] = []

    def read(url: str) -> ReadOnlyStore:
        return tsck.open(url, read_only=True, cache_dir=tmp_path / "reader")

    def write(url: str) -> Store:
        return tsck.open(url, no_sync=True, cache_dir=tmp_path / "writer")

    def make(*urls: str, allow: str = "") -> Sources:
        db, writing = str(tmp_path / f"catalog{len(made)}.sqlite"), write if allow else None
        opened = Sources(db, urls or [store.url], read, is_private=True, wait_seconds=PATIENCE_SECONDS, open_writable=writing)
        made.append(opened)
        opened.start()
        return opened

    yield make
    for each in made:
        each.close()


@pytest.fixture
def client(sources: Callable[..., Sources]) -> Client:
    """Makes browsers without a screen, for the pages of stores."""

    def make(*urls: str, access: Access = ACCESS, base_url: str = BASE) -> TestClient:
        return TestClient(make_app(sources(*urls), access), base_url=base_url)

    return make


def enter(client: TestClient) -> TestClient:
    assert client.get("/open/the-token", follow_redirects=False).status_code == 303
    return client


@pytest.fixture
def browser(client: Client) -> TestClient:
    """Of `store`, past the token. The server has read the log: the next page reads what is added after this."""
    entered = enter(client())
    entered.get("/")
    return entered


@pytest.fixture
def open_page(chromium: Any, sources: Callable[..., Sources]) -> Iterator[Open]:
    """See `Open`. Fails if a page logs an error or breaks its content security policy."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        port = listening.getsockname()[1]
        access = Access.of("", port)
        problems: list[str] = []
        contexts: list[Any] = []
        started: list[threading.Thread] = []

        def open_page(path: str, *urls: str, allow: str = "", **options: Any) -> Any:
            if not started:
                app = make_app(sources(*urls, allow=allow), replace(access, allow=parse_allow(allow)))
                started.append(threading.Thread(target=serve, args=(app, listening), daemon=True))
                started[0].start()
            context = chromium.new_context(**options)
            contexts.append(context)
            page = context.new_page()
            page.set_default_timeout(PATIENCE_SECONDS * 1000)
            page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
            page.on("pageerror", lambda error: problems.append(str(error)))
            page.goto(f"http://127.0.0.1:{port}{access.entrance}")
            page.goto(f"http://127.0.0.1:{port}{access.prefix}{path}")
            return page

        yield open_page
        for context in contexts:
            context.close()
        assert problems == []

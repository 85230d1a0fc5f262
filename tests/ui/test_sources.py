"""What the pages read: logs that take long, stores that die or are replaced, and the catalog that a server keeps."""

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

import tensorstore_ck as tsck
from tensorstore_ck.catalog import Catalog
from tensorstore_ck.store import ReadOnlyStore, Store
from tensorstore_ck.ui import Sources, make_app, private_catalog
from tests.catalog.made import publish
from tests.effort import PATIENCE_SECONDS
from tests.ui.conftest import ACCESS, BASE, Client, enter


@pytest.mark.race
def test_a_store_that_does_not_answer_stops_no_page(store: Store, tmp_path: Path) -> None:
    publish(store, "runs/gpt", 1)
    answers = threading.Event()

    def open_store(url: str) -> ReadOnlyStore:
        if url == "slow":
            answers.wait(PATIENCE_SECONDS)
            url = store.url
        return tsck.open(url, read_only=True, cache_dir=tmp_path / "reader")

    sources = Sources(str(tmp_path / "catalog.sqlite"), ["slow"], open_store, is_private=True, wait_seconds=0)
    sources.start()
    browser = enter(TestClient(make_app(sources, ACCESS), base_url=BASE))
    page = browser.get("/")
    assert "<strong>slow</strong> is being read" in page.text
    assert "hx-trigger" in page.text  # the page looks again
    answers.set()
    sources._wait_seconds = PATIENCE_SECONDS
    page = browser.get("/")
    assert "runs/gpt" in page.text
    assert "is being read" not in page.text
    assert "hx-trigger" not in page.text
    sources.close()


@pytest.mark.race
def test_a_page_shows_what_was_written_while_the_log_was_being_read(sources: Callable[..., Sources], store: Store) -> None:
    opened = sources()
    browser = enter(TestClient(make_app(opened, ACCESS), base_url=BASE))
    assert "runs/late" not in browser.get("/").text
    (source,) = opened._sources
    read, has_read, goes_on = source.synced.refresh, threading.Event(), threading.Event()

    def slow(**options: Any) -> Any:
        error = read(**options)
        has_read.set()
        assert goes_on.wait(PATIENCE_SECONDS)
        return error

    source.synced.refresh = slow  # type: ignore[method-assign]
    opened._begin(source)
    reading = source.reading
    assert reading is not None
    assert has_read.wait(PATIENCE_SECONDS)
    publish(store, "runs/late", 1)
    join = reading.join
    reading.join = lambda timeout=None: (goes_on.set(), join(timeout))[1]  # type: ignore[method-assign, func-returns-value]
    assert "runs/late" in browser.get("/").text


@pytest.mark.race
def test_a_page_beside_one_that_begins_to_read_the_log(sources: Callable[..., Sources], monkeypatch: pytest.MonkeyPatch) -> None:
    opened = sources()
    opened.refresh()
    start, is_starting, goes_on = threading.Thread.start, threading.Event(), threading.Event()

    def start_slowly(thread: threading.Thread) -> None:
        if thread.name == "tsck-ui" and not is_starting.is_set():
            is_starting.set()
            assert goes_on.wait(PATIENCE_SECONDS)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_slowly)
    with ThreadPoolExecutor(2) as pages:
        first = pages.submit(opened.refresh)
        assert is_starting.wait(PATIENCE_SECONDS)
        second = pages.submit(opened.refresh)
        wait([second], 0.05)  # where it does not wait until the thread of the first one has started, it has failed
        goes_on.set()
        assert (first.result(), second.result()) == ({}, {})


@pytest.mark.filterwarnings("ignore::tensorstore_ck.log.watermark.LogChangedWarning")
def test_a_store_that_another_replaced_is_no_longer_shown(client: Client, store: Store, tmp_path: Path) -> None:
    publish(store, "runs/old", 1)
    browser = enter(client())
    assert "runs/old" in browser.get("/").text
    shutil.rmtree(tmp_path / "store")
    assert "cannot be read now" in browser.get("/").text
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=tmp_path / "cache") as other:
        publish(other, "runs/new", 1)
    text = browser.get("/").text
    assert "runs/new" in text
    assert "runs/old" not in text


def test_servers_of_the_same_stores_keep_one_catalog(store: Store, tmp_path: Path) -> None:
    for number, urls in enumerate(([store.url, "s3://bucket/a"], ["s3://bucket/a", store.url])):
        with private_catalog(str(tmp_path / "cache"), urls) as path, Catalog(path) as catalog:
            report = catalog.sync(store)
            assert report.head_n == report.entries + number * report.head_n
    assert Path(path).exists()
    with private_catalog(str(tmp_path / "cache"), [store.url]) as other:
        assert other != path


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    with private_catalog(str(tmp_path / "cache"), ["a"]) as path:
        assert not path.startswith(str(tmp_path / "cache"))
    assert not Path(path).parent.exists()

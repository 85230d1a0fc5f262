"""Last runs, a check on request, what is marked, and where packs lie."""

import re
import shlex
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.log import LogChangedWarning
from tensorstore_ck.store import Store
from tensorstore_ck.ui import Sources, health, make_app
from tensorstore_ck.ui.background import CancelledError
from tests.catalog.made import publish
from tests.ui.conftest import ACCESS, BASE, Client, enter
from tests.ui.test_space import page_of, put, rows_of


def health_of(store: Store, query: str = "") -> str:
    return page_of(store, "health", query)


def files_of(store: Store) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(store.url).rglob("*") if path.is_file()}


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def packs_of(store: Store) -> list[Path]:
    return [path for path in (Path(store.url) / "packs").rglob("*") if path.is_file()]


def test_a_check_changes_nothing_and_shows_what_to_run(browser: TestClient, store: Store, tmp_path: Path) -> None:
    put(store, "runs/a", 1, 50_000)
    text = browser.get(health_of(store)).text
    assert "as <code>tsck fsck</code> does" in text
    assert "Findings" not in text
    assert "No errors in what was checked" in browser.get(health_of(store, "?check=yes")).text
    (pack,) = packs_of(store)
    flip(pack, -100)  # its table
    before = files_of(store)
    text = browser.get(health_of(store, "?check=yes")).text
    assert files_of(store) == before
    assert "No errors" not in text
    (row,) = re.findall(r"<tr><td><span class=\"badge bad\">.*?</tr>", text)
    assert pack.name in row
    assert 'Repairable">yes</td>' in row
    (repair,) = {unescape(each) for each in re.findall(r"<code>(tsck fsck [^<]*--repair[^<]*)</code>", text)}
    assert repair.endswith(f" -s {store.url}")
    env = {"TSCK_CACHE_DIR": str(tmp_path / "cli")}
    assert CliRunner().invoke(main, shlex.split(repair)[1:], env=env, catch_exceptions=False).exit_code == 0
    assert "No errors in what was checked" in browser.get(health_of(store, "?check=yes")).text


def test_notices_are_grouped_by_kind(browser: TestClient, store: Store) -> None:
    put(store, "runs/a", 1, 50_000)
    (pack,) = packs_of(store)
    for _ in range(3):
        (pack.parent / ulid_text(new_ulid())).write_bytes(pack.read_bytes())
    text = browser.get(health_of(store, "?check=yes")).text
    assert "No errors in what was checked" in text
    (group,) = (found for found in re.findall(r"<details>\s*<summary>(.*?)</details>", text, re.DOTALL) if "foreign_object" in found)
    assert re.sub(r"<[^>]*>", "", group.partition("</summary>")[0]) == "foreign_object 3 notices"
    assert group.count("<tr>") == 3


def test_what_this_store_cannot_repair(browser: TestClient, store: Store) -> None:
    put(store, "runs/a", 1, 50_000)
    put(store, "runs/a", 2, 50_000)
    for pack in packs_of(store):
        pack.unlink()
    text = browser.get(health_of(store, "?check=yes")).text
    assert '<dt>Errors</dt><dd class="bad">2<' in text
    assert text.count('Repairable">no</td>') == 2
    assert re.search(r"runs/a@[12] \(root \w{12}\)", text)
    assert f"--from OTHER_STORE -s {store.url}</code></pre>" in text


def test_a_check_that_ends_with_an_error(browser: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, "runs/a", 1)

    def fail(*_: object, **__: object) -> None:
        store.resolve("runs/<script>")

    monkeypatch.setattr(Store, "fsck", fail)
    text = browser.get(health_of(store, "?check=yes")).text
    assert "It could not be checked" in text
    assert "<script>" not in text.split("<main")[1]
    assert "No errors" not in text


def test_the_end_of_the_server_ends_a_check(sources: Callable[..., Sources], store: Store) -> None:
    put(store, "runs/a", 1, 50_000)
    opened = sources()
    enter(TestClient(make_app(opened, ACCESS), base_url=BASE)).get("/")
    calls: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        calls.append(what)
        if len(calls) > 1:
            raise CancelledError

    with pytest.raises(CancelledError):
        health._check(opened.open(opened.key(store.engine.config.uuid)), progress)
    assert len(calls) >= 2


def test_marked_snapshots(browser: TestClient, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_MARKED", 2)
    roots = [publish(store, "runs/a", step) for step in range(6)]
    assert "No snapshot is marked" in browser.get(health_of(store)).text
    for root in roots[:4]:
        store.mark(root, reason="<b>loss</b> is NaN")
    store.mark(roots[0], "")
    text = browser.get(health_of(store)).text
    rows = rows_of(text, "Marked snapshots")
    assert list(rows) == [roots[3][:12], roots[2][:12]]
    assert rows[roots[3][:12]][:2] == ["runs/a", "3"]
    assert "&lt;b&gt;loss" in text
    assert "and 1 older ones" in text


def test_locations_that_answer_and_that_do_not(browser: TestClient, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "REACH_AGAIN_NS", 0)
    put(store, "runs/a", 1, 50_000)
    put(store, "runs/a", 2, 60_000)
    assert list(rows_of(browser.get(health_of(store)).text, "Locations of packs")) == ["the store itself"]
    store.set_policy("runs/*", move_after=("1s", str(tmp_path / "cold")))
    real = store.engine.clock
    store.engine.clock = lambda: real() + 10**12
    store.migrate_tiers()
    browser.get(page_of(store, "space", "?measure=yes"))
    text = browser.get(health_of(store)).text
    rows = rows_of(text, "Locations of packs")
    (cold,) = (name for name in rows if name.startswith(str(tmp_path / "cold")))
    moved = [path for path in Path(cold).rglob("packs/*/*") if path.is_file()]
    assert rows[cold][0] == str(len(moved))
    assert rows[cold][1].endswith("KiB")
    assert rows[cold][2] == "answers"
    assert "move_after 1s to" in unescape(text)
    shutil.rmtree(tmp_path / "cold")
    rows = rows_of(browser.get(health_of(store)).text, "Locations of packs")
    assert rows[cold][2].startswith("cannot be used:")


def test_a_log_that_went_back(client: Client, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    publish(store, "runs/a", 1)
    publish(store, "runs/a", 2)
    browser = enter(client())
    assert "went back" not in browser.get(health_of(store)).text
    newest = max(path for path in (Path(store.url) / "log").rglob("*") if path.is_file())
    newest.unlink()
    with pytest.warns(LogChangedWarning):
        text = browser.get(health_of(store)).text
    assert "The log went back" in text
    assert f"tsck accept-log -s {store.url}" in text


def test_last_gc(browser: TestClient, store: Store) -> None:
    put(store, "runs/a", 1, 50_000)
    put(store, "runs/b", 1, 60_000)
    assert "has no run of gc" in browser.get(health_of(store)).text
    store.forget("runs/b")
    store.gc(GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1))
    rows = rows_of(browser.get(health_of(store)).text, "Last runs")
    assert rows["gc"][1] == "ok"
    assert "deleted packs: 1" in rows["gc"][2]
    packs_of(store)[0].unlink()
    store.fsck()
    text = browser.get(health_of(store)).text
    rows = rows_of(text, "Last runs")
    assert list(rows) == ["fsck", "gc"]
    assert rows["fsck"][1] == "findings"
    assert "errors: 1" in rows["fsck"][2]
    assert text.count('<td class="bad">findings</td>') == 1


def test_a_store_that_is_gone_shows_what_the_catalog_has(browser: TestClient, store: Store) -> None:
    store.mark(publish(store, "runs/a", 1), reason="by hand")
    browser.get(health_of(store))
    shutil.rmtree(store.url)
    text = browser.get(health_of(store)).text
    assert "by hand" in text
    assert "The store cannot be opened now" in text
    assert "it could not be checked" in browser.get(health_of(store, "?check=yes")).text.lower()

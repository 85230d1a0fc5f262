"""What holds a store's bytes, how it grew, and what a policy would keep."""

import json
import os
import re
import shlex
import threading
import time
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from starlette.testclient import TestClient

from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.common.prices import Prices
from tensorstore_ck.log import ObjectKey
from tensorstore_ck.store import Store
from tensorstore_ck.ui import Sources, make_app, space
from tensorstore_ck.ui.background import Progress
from tensorstore_ck.ui.pages import Pages
from tests.catalog.made import publish
from tests.effort import PATIENCE_SECONDS
from tests.ui.conftest import ACCESS, BASE, Open, enter

SIZES = {"live": 100_000, "pinned": 200_000, "undo": 300_000}


def page_of(store: Store, name: str = "space", query: str = "") -> str:
    return f"/stores/{store.engine.config.uuid}/{name}{query}"


def put(store: Store, ref: str, step: int, size: int) -> str:
    torch.manual_seed(step)
    return store.put_snapshot({"x": torch.randint(256, (size,), dtype=torch.uint8)}, ref=ref, step=step).root


def stray(store: Store, size: int, age_seconds: float) -> None:
    """A pack that nothing holds."""
    path = Path(store.url) / ObjectKey("pack", new_ulid()).name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    at = time.time() - age_seconds
    os.utime(path, (at, at))


def rows_of(text: str, table: str) -> dict[str, list[str]]:
    """The rows of a table by their first cell, without markup."""
    body = text.split(f'aria-label="{table}"')[1].split("</table>", maxsplit=1)[0]
    rows = [[unescape(re.sub(r"<[^>]*>", "", cell)).strip() for cell in re.split("</t[hd]>", row)] for row in body.split("<tr>")[2:]]
    return {row[0]: row[1:] for row in rows}


def test_states_are_exact_and_together_the_whole_store(browser: TestClient, store: Store) -> None:
    put(store, "runs/a", 1, SIZES["live"])
    put(store, "runs/b", 2, SIZES["pinned"])
    put(store, "runs/c", 3, SIZES["undo"])
    store.pin("runs/b", owner="me")
    store.tag("kept", "runs/a")
    store.pin("runs/a")  # a block that several hold counts once
    store.forget("runs/b", "runs/c")
    stray(store, 400_000, age_seconds=3 * 86_400)
    stray(store, 500_000, age_seconds=0)
    first = browser.get(page_of(store)).text
    assert "It was not measured" in first
    assert "Bytes by state" not in first
    browser.get(page_of(store, query="?measure=yes"))
    usage = store.usage()
    found = {state.name: state.bytes for state in space.states_of(usage)}
    files = [file for file in Path(store.url).rglob("*") if file.is_file()]
    assert sum(found.values()) == sum(file.stat().st_size for file in files if not file.name.startswith(("reserve-", "store.json")))
    assert (found["Young"], found["Garbage"]) == (500_000, 400_000)
    for name, size in (("Live", SIZES["live"]), ("Pinned", SIZES["pinned"]), ("Undo window", SIZES["undo"])):
        assert size <= found[name] < size + 5000  # parts and records
    text = browser.get(page_of(store)).text
    rows = rows_of(text, "Bytes by state")
    assert (rows["Young"][0], rows["Garbage"][0]) == ("488.3 KiB", "390.6 KiB")
    widths = re.findall(r'<rect class="state-\d" x="[\d.]+" y="0" width="([\d.]+)"', text)
    assert len(widths) == 6
    assert sum(map(float, widths)) == pytest.approx(1000, abs=0.1)
    assert rows_of(text, "Bytes by branch and tag").keys() == {"runs/a", "kept", "Everything held"}
    assert f"<code>{usage.freeable.command}</code>" in text


def test_a_measurement_that_fails_says_so_and_keeps_the_last(browser: TestClient, store: Store) -> None:
    put(store, "runs/a", 1, 10_000)
    browser.get(page_of(store, query="?measure=yes"))
    for part in (Path(store.url) / "parts").glob("*/*"):
        part.unlink()
    text = browser.get(page_of(store, query="?measure=yes")).text
    assert "It could not be measured" in text
    assert "Bytes by state" in text


def test_a_long_read_shows_how_far_it_is_and_the_server_ends_it(
    sources: Callable[..., Sources], store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "runs/a", 1, 10_000)
    is_reading, goes_on = threading.Event(), threading.Event()

    def slow(_: object, *, progress: Progress) -> None:
        progress("reading snapshots", 3, 10)
        is_reading.set()
        goes_on.wait(PATIENCE_SECONDS)
        progress("reading snapshots", 4, 10)

    monkeypatch.setattr(Store, "usage", slow)
    monkeypatch.setattr("tensorstore_ck.ui.background.PATIENCE_SECONDS", 0.0)
    opened = sources()
    browser = enter(TestClient(make_app(opened, ACCESS), base_url=BASE))
    browser.get(page_of(store, query="?measure=yes"))
    assert is_reading.wait(PATIENCE_SECONDS)
    text = browser.get(page_of(store, query="?measure=yes")).text  # it is not started twice
    assert '<progress max="10" value="3"' in text
    assert 'hx-trigger="load delay:2s"' in text
    assert "Measure again" not in text
    ending = threading.Thread(target=opened.background.close, args=(PATIENCE_SECONDS,))
    ending.start()
    goes_on.set()
    ending.join(PATIENCE_SECONDS)
    assert not ending.is_alive()
    read = opened.background.read(store.engine.config.uuid, space.KIND)
    assert (read.is_running, read.result, read.error) == (False, None, "the server ended")


def test_growth_adds_up_by_time(browser: TestClient, store: Store) -> None:
    assert "Nothing was saved yet" in browser.get(page_of(store)).text
    now = store.engine.clock()
    for step, (age_days, size) in enumerate([(40, 1000), (0, 500), (20, 200), (3, 70)]):  # the log's order is not the order of time
        store.engine.log._clock = lambda at=now - age_days * space.DAY_NS: at  # type: ignore[misc]
        publish(store, "runs/a", step, new_bytes=size)
    text = browser.get(page_of(store)).text
    times, totals = json.loads(text.split('id="growth-data">')[1].split("<")[0])
    assert totals == [1000, 1200, 1270, 1770]
    assert [round((times[-1] - each) / 86_400) for each in times] == [40, 20, 3, 0]
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)<", text))
    assert {name: facts[name] for name in ("Last day", "Last 7 days", "Last 30 days", "Put in all")} == {
        "Last day": "500 B",
        "Last 7 days": "570 B",
        "Last 30 days": "770 B",
        "Put in all": "1.7 KiB",
    }


def test_what_a_policy_would_do_is_what_its_command_does(browser: TestClient, store: Store, tmp_path: Path) -> None:
    for ref in ("runs/a", "runs/b", "other"):
        for step in range(1, 7):
            put(store, ref, step + 10 * len(ref) + ord(ref[-1]), 20_000)
    store.set_policy("runs/b", keep_last=4)
    for ref in ("runs/a", "runs/b"):
        store.annotate(ref, {"val loss": 1.0})
    asked = {"branches": "runs/*", "keep_last": "2", "keep_first": "yes", "keep_best": "1:val loss:min", "max_bytes": "1GB"}
    text = browser.get(page_of(store), params=asked).text
    assert "policies are set for" in text.lower()
    facts = dict(re.findall(r"<dt>([^<]*)</dt><dd>([^<]*)<", text))
    assert (facts["Would go"], facts["Would stay"], facts["Branches"]) == ("4", "8", "2")
    assert 'value="1:val loss:min"' in text
    command = unescape(next(each for each in re.findall(r"<code>(tsck policy set [^<]*)<", text)))
    assert len(store.policies()) == 1
    before = store.usage().objects_bytes
    for each in (command, f"tsck policy apply -s {store.url}", f"tsck gc --undo-window 0s --min-age 0s --max-delete 100% -s {store.url}"):
        done = CliRunner().invoke(main, shlex.split(each)[1:], env={"TSCK_CACHE_DIR": str(tmp_path / "cli")}, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert len(store.log("runs/a")) + len(store.log("runs/b")) == 8
    assert len(store.log("other")) == 6
    freed = before - store.usage().objects_bytes
    said = float(facts["gc then frees"].split()[0]) * 1024
    assert said == pytest.approx(freed, abs=4000)  # the log has grown, and tables of packs are not counted


WRONG_RULES: list[tuple[dict[str, str], str]] = [
    ({"branches": "runs/*"}, "a policy needs a rule that keeps something"),
    ({"branches": "runs/*", "keep_last": "-5"}, "keep_last must be a whole number"),
    ({"branches": "runs/*", "keep_last": "9" * 5000}, "keep_last is longer"),
    ({"branches": "runs/*", "keep_steps": "--5"}, "keep_steps must be a list"),
    ({"branches": "runs/*", "keep_last": "1", "max_bytes": "9" * 400}, "max_bytes must be a size"),
    ({"branches": "runs/*", "keep_best": "<script>"}, "keep_best must be like"),
    ({"branches": "nothing/*", "keep_last": "1"}, "no branch matches"),
    ({"branches": "<script>", "keep_last": "1"}, "matches no branch"),
    ({"branches": "", "keep_last": "1"}, "matches no branch"),
]


def test_wrong_rules_are_named_at_the_form(browser: TestClient, store: Store) -> None:
    publish(store, "runs/a", 1)
    for asked, error in WRONG_RULES:
        text = browser.get(page_of(store), params=asked).text
        assert error in unescape(text).split('role="alert"')[1].split("</p>")[0]
        assert "<script>" not in text
        for name, value in asked.items():
            if len(value) < 1000:
                assert f'name="{name}" value="{value.replace("<", "&lt;").replace(">", "&gt;")}"' in text


def test_commands_name_the_store_once_and_are_completed(sources: Callable[..., Sources], store: Store) -> None:
    opened = sources()
    opened.refresh()
    pages, key = Pages(opened, ACCESS, lambda text: text.replace("tsck", "tsck --x")), opened.key(store.engine.config.uuid)
    assert pages.completed(key, "run `tsck gc --grace 1s` or `tsck fsck -s elsewhere`, not `ls`") == (
        f"run `tsck --x gc --grace 1s -s {store.url}` or `tsck --x fsck -s elsewhere`, not `ls`"
    )
    assert pages.command(key, "tag", "it's", "x") == f"""tsck --x tag 'it'"'"'s' x -s {store.url}"""


@pytest.mark.slow
def test_space_in_a_browser(open_page: Open, store: Store) -> None:
    put(store, "runs/a", 1, 100_000)
    put(store, "runs/a", 2, 100_000)
    put(store, "runs/a", 3, 100_000)
    page = open_page(page_of(store))
    assert page.locator("#growth canvas").is_visible()
    ticks = page.evaluate("document.getElementById('growth').uplot.axes[0]._values")
    assert all(re.fullmatch(r"\d\d:\d\d:\d\d(\.\d+)?(\n20\d\d-\d\d-\d\d)?", tick) for tick in ticks), ticks
    assert any("\n" in tick for tick in ticks)
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("img", name="Live").wait_for()
    page.get_by_label("keep_last").fill("1")
    page.get_by_label("Branches").fill("runs/*")
    page.get_by_role("button", name="Try").click()
    page.get_by_role("group", name="Would go").wait_for()
    assert page.locator("#what-if dd").first.text_content() == "1"
    assert page.locator("#growth canvas").is_visible()
    page.get_by_label("keep_last").fill("x")
    page.get_by_role("button", name="Try").click()
    page.get_by_role("alert").wait_for()
    assert "keep_last must be a whole number" in (page.get_by_role("alert").text_content() or "")


def test_space_that_is_left_and_what_it_costs(sources: Callable[..., Sources], store: Store) -> None:
    put(store, "runs/a", 1, SIZES["live"])
    put(store, "runs/a", 2, SIZES["live"])
    put(store, "runs/a", 3, SIZES["live"])
    made = {
        words: enter(TestClient(make_app(sources(), ACCESS, prices=Prices.parse(words)), base_url=BASE)) for words in ((), ("file=1e6",))
    }
    for words, client in made.items():
        client.get(page_of(store, query="?measure=yes"))
        text = client.get(page_of(store, query="?branches=runs/a&keep_last=1")).text
        assert "Free where the store is" in text
        assert ("Costs a month" in text, "A month" in text, "Saves a month" in text) == (bool(words),) * 3
        assert len(rows_of(text, "Bytes by branch and tag")["runs/a"]) == 7 + len(words)

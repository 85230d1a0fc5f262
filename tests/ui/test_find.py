"""The page that searches all stores, and the page of what happened in them."""

import math
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from starlette.testclient import TestClient

import tensorstore_ck as tsck
from tensorstore_ck.catalog.read_entries import CHANGED_TABLES
from tensorstore_ck.store import Store
from tensorstore_ck.ui import activity
from tests.catalog.made import publish
from tests.ui.conftest import Client, Open, enter


def found(browser: TestClient, **query: Any) -> tuple[str, list[str]]:
    """The page, and the steps in its table."""
    text = browser.get("/find", params=query).raise_for_status().text
    table = text.partition("<tbody>")[2].partition("</tbody>")[0]
    return text, [row.split('class="number">')[1].split("<")[0] for row in table.split("<tr>")[1:]]


def test_conditions_order_and_state(client: Client, store: Store) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, math.nan)):
        root = publish(store, "runs/gpt", step, {"loss": loss})
    store.mark("runs/gpt@3", reason="<i>")
    store.tag("best", "runs/gpt@2")
    store.pin("runs/gpt@2", reason="paper")
    store.forget("runs/gpt@1")
    browser = enter(client())
    assert found(browser)[1] == ["4", "3", "2"]
    assert found(browser, q="loss < 5", order="loss")[1] == ["2", "3"]
    assert found(browser, q="loss < 5", order="loss", descending="yes", state="all")[1] == ["1", "3", "2"]
    assert found(browser, state="forgotten")[1] == ["1"]
    text, steps = found(browser, q="loss is nan")
    assert steps == ["4"]
    assert f'/snapshot?at={store.resolve(root).id}"' in text
    assert "/ref?name=runs%2Fgpt" in text
    assert '<td class="number">nan</td>' in text
    text, _ = found(browser, q="step < 4")
    assert '<span class="badge mark" title="&lt;i&gt;">bad</span>' in text
    assert '<span class="badge tag">best</span> <span class="badge pin">pinned</span>' in text
    assert "No snapshot is found" in found(browser, q="step > 9")[0]


def test_an_error_is_at_its_input_and_says_where(client: Client, store: Store) -> None:
    publish(store, "runs/gpt", 1, {"loss": 1.0})
    browser = enter(client())
    text, steps = found(browser, q="loss < 2 and and")
    assert steps == []
    assert "syntax error at character 14" in text
    assert "loss &lt; 2 and <mark>and</mark>" in text
    assert re.search(r'name="q"[^>]*aria-invalid="true" aria-describedby="q-error"', text)
    assert "<mark> </mark>" in found(browser, q="loss <")[0]
    text, _ = found(browser, q="lozz < 2")
    assert "a metric or an attribute &#39;lozz&#39;: there are loss" in text.split('id="q-error"')[1]
    text, _ = found(browser, q="loss < 2", order="tag")
    assert 'id="q-error"' not in text
    assert "cannot order by tag" in text.split('id="order-error"')[1]
    assert "has a metric" in found(browser, order="lozz")[0].split('id="order-error"')[1]
    assert "&lt;script&gt;" in found(browser, q="<script>")[0]


def test_pages_of_what_is_found(client: Client, store: Store) -> None:
    for step in range(120):
        publish(store, "runs/gpt", step, {"loss": float(step)})
    browser = enter(client())
    text, steps = found(browser, q="loss >= 0", order="loss", page=2)
    assert steps == [str(step) for step in range(50, 100)]
    assert "/find?page=3&amp;q=loss+%3E%3D+0&amp;order=loss" in text
    text, steps = found(browser, q="loss >= 0", order="loss", page=3)
    assert steps == [str(step) for step in range(100, 120)]
    assert "page=4" not in text


def test_several_stores(client: Client, store: Store, tmp_path: Path) -> None:
    publish(store, "runs/gpt", 1)
    with tsck.open(tmp_path / "other", create=True, no_sync=True, cache_dir=tmp_path / "cache") as other:
        publish(other, "runs/bert", 2)
        browser = enter(client(store.url, other.url))
        text, steps = found(browser)
        assert steps == ["2", "1"]
        assert f"/stores/{other.engine.config.uuid}/ref?name=runs%2Fbert" in text
        assert '<th scope="col">Store</th>' in text
        listed = browser.get("/activity", params={"store": other.engine.config.uuid}).text
        assert "runs/bert" in listed
        assert "runs/gpt" not in listed


def happened(text: str) -> list[str]:
    return re.findall(r'<span class="badge" title="operation \w+">([^<]+)</span>', text)


def test_each_operation_has_words() -> None:
    assert activity.WORDS.keys() == CHANGED_TABLES.keys()


def test_activity_is_the_log_newest_first(client: Client, store: Store) -> None:
    publish(store, "runs/gpt", 7, logical_bytes=3 << 20, new_bytes=2 << 20)
    store.mark("runs/gpt", reason="<b>loss</b>")
    store.tag("best", "runs/gpt")
    store.branch("runs/<b>".replace("<b>", "b"), "best")
    browser = enter(client())
    text = browser.get("/activity").text
    assert happened(text) == ["made a branch", "tagged", "marked", "saved"]
    assert "step 7, 3.0 MiB, 2.0 MiB new" in text
    assert "mark bad, reason &lt;b&gt;loss&lt;/b&gt;" in text
    assert happened(browser.get("/activity?op=tag").text) == ["tagged"]
    assert happened(browser.get("/activity?ref=runs/gpt").text) == ["saved"]
    assert "No operation is found" in browser.get("/activity?op=unknown&before=x").text


def test_activity_of_one_time_loses_nothing_between_pages(client: Client, store: Store) -> None:
    now = store.engine.clock()
    store.engine.log._clock = lambda: now
    for step in range(120):
        publish(store, "runs/gpt", step)
    browser = enter(client())
    url, steps = "/activity?ref=runs/gpt", []
    for _ in range(3):
        text = browser.get(url).text
        steps += [int(step) for step in re.findall(r"step (\d+),", text)]
        older = re.search(r'href="(/activity\?before=[^"]*)"', text)
        url = older[1].replace("&amp;", "&") if older else ""
    assert steps == list(range(119, -1, -1))
    assert url == ""


# --- in a browser -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_words_of_a_condition_are_completed(open_page: Open, store: Store) -> None:
    publish(store, "runs/gpt", 1, {"loss": 1.0, "val loss": 2.0, "</script><b>": 1.0})
    page = open_page("/find")
    options = "[...document.querySelectorAll('#q-words option')].map((each) => each.value)"
    page.get_by_label("Condition").fill("step > 0 and lo")
    assert page.evaluate(options) == ["step > 0 and logical_bytes", "step > 0 and loss"]
    page.get_by_label("Condition").fill('not ("va')
    assert page.evaluate(options) == ['not ("val loss"']
    page.get_by_label("Condition").fill("job = 'lo")
    assert page.evaluate(options) == []
    page.get_by_label("Condition").fill("loss < 2")
    page.get_by_role("button", name="Find").click()
    page.get_by_role("columnheader", name="loss").wait_for()
    assert page.url.endswith(f"/find?q={quote('loss < 2').replace('%20', '+')}&order=&state=live")

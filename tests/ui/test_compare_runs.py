"""Several runs over each other, and pages that show what is new while they are open."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.store import Store
from tests.catalog.made import publish
from tests.ui.conftest import Client, Open, enter

DRAWN = "[...document.querySelectorAll('.chart')].map((at) => at.uplot?.data.map((values) => [...values]))"
SCALE = "(({ min, max }) => [min, max])(document.querySelector('.chart').uplot.scales.x)"
HIDE = "(hidden) => Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true })"


def overlay(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(unescape(re.findall(r'data-overlay="([^"]*)"', text)[0]))
    return found


def test_runs_of_several_stores_are_told_apart(client: Client, store: Store, tmp_path: Path) -> None:
    with tsck.open(tmp_path / "other", create=True, no_sync=True, cache_dir=tmp_path / "cache") as other:
        for each in (store, other):
            publish(each, "runs/gpt", 1, {"loss": 2.0})
        publish(other, "runs/bert", 1, {"loss": 3.0})
        browser = enter(client(store.url, other.url))
        overview = unescape(browser.get("/").text)
        names = re.findall(r'<input type="checkbox" name="run" form="draw" value="([^"]*)"', overview)
        assert sorted(names) == sorted(
            f"{ref} of {url}" for ref, url in [("runs/gpt", store.url), ("runs/gpt", other.url), ("runs/bert", other.url)]
        )
        lines = overlay(browser.get("/runs", params={"run": names}).text)["lines"]
        assert {line["name"] for line in lines} == {f"runs/gpt of {store.url}", f"runs/gpt of {other.url}", "runs/bert"}
        assert [line["colour"] for line in lines] == [1, 2, 3]
        for line in lines:
            (chart,) = browser.get(line["series"]).json()["charts"]
            assert chart["line"]["values"] == [3.0 if line["name"] == "runs/bert" else 2.0]


def test_what_a_page_of_runs_cannot_draw(client: Client, store: Store) -> None:
    for number in range(8):
        publish(store, f"runs/{number}", 1, {"loss": 1.0} if number else {})
    browser = enter(client())
    assert "There is no branch &lt;b&gt; here" in browser.get("/runs", params={"run": ["<b>", "runs/1"]}).text
    assert "have no metrics" in browser.get("/runs?run=runs/0").text
    text = browser.get("/runs", params={"run": [f"runs/{number}" for number in range(8)]}).text
    assert "A chart draws 6 runs" in text
    assert len(overlay(text)["lines"]) == 6


@pytest.mark.slow
def test_runs_are_drawn_over_each_other_and_labels_are_whole(open_page: Open, store: Store) -> None:
    for ref, steps in {"runs/a": (1, 2, 1_000_000), "runs/b": (2, 3)}.items():
        for step in steps:
            publish(store, ref, step, {"loss": 0.000123 + 1e-9 * (step % 10)})
    page = open_page("/")
    for box in page.get_by_role("checkbox", name="Choose").all():
        box.check()
    page.get_by_role("button", name="Draw the chosen runs").click()
    page.locator("#overlays canvas").wait_for()
    (drawn,) = page.evaluate(DRAWN)
    assert drawn[0] == [1, 2, 3, 1_000_000]
    assert sorted(sum(value is not None for value in values) for values in drawn[1:]) == [2, 3]
    widest, size = page.evaluate("""() => {
        const plot = document.querySelector('.chart').uplot, axis = plot.axes[1];
        plot.ctx.font = axis.font[0];
        return [Math.max(...axis._values.map((label) => plot.ctx.measureText(label).width / devicePixelRatio)), axis._size];
    }""")
    assert size >= widest + 10


@pytest.mark.slow
def test_a_page_shows_what_is_new_while_it_is_visible(open_page: Open, store: Store) -> None:
    for step in (1, 2, 3):
        publish(store, "runs/gpt", step, {"loss": 1 / step})
    page = open_page(f"/stores/{store.engine.config.uuid}/ref?name=runs/gpt")
    page.clock.install()
    page.reload()
    page.locator(".chart .uplot").wait_for()
    page.locator("#saves [name=old]").last.check()
    chosen = page.locator("#saves [name=old]:checked").get_attribute("value")
    page.evaluate("document.activeElement.blur()")
    publish(store, "runs/gpt", 4, {"loss": 0.2})
    page.clock.run_for(5000)
    page.locator(".chart[aria-label*='4 values, ']").wait_for()
    page.locator("#saves tbody tr").nth(3).wait_for()
    assert page.locator("#facts dd").first.text_content() == "4"
    assert page.locator("#saves [name=old]:checked").get_attribute("value") == chosen
    page.evaluate(HIDE, True)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator(".u-over").scroll_into_view_if_needed()
    box = page.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.mouse.up()
    zoom = page.evaluate(SCALE)
    publish(store, "runs/gpt", 5, {"loss": 0.1})
    page.clock.run_for(20_000)
    assert asked == []
    page.evaluate(HIDE, False)
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.locator(".chart[aria-label*='5 values, ']").wait_for()
    assert page.evaluate(SCALE) == zoom
    assert zoom[1] < 3

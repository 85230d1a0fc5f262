"""The page of a branch, and the series that its charts draw."""

import math
from typing import Any

import pytest
from starlette.testclient import TestClient

from tensorstore_ck.store import Store
from tests.catalog.made import publish
from tests.ui.conftest import Client, Open, enter


def difficult(store: Store) -> None:
    """A branch that was reset and put steps twice, with NaN and infinity, processes that follow each other, and a branch of its own."""
    log = store.engine.log
    log._actor = "ada@one:1"
    for step in (10, 20, 30, 40):
        publish(store, "runs/gpt", step, {"loss": 10.0 - step / 10, "lr": 1.0})
    publish(store, "runs/gpt", 50, {"loss": math.nan})
    store.mark("runs/gpt", reason="NaN")
    store.reset("runs/gpt", "runs/gpt@20")
    log._actor = "ada@two:2"
    publish(store, "runs/gpt", 30, {"loss": 5.5})
    publish(store, "runs/gpt", 40, {"loss": math.inf})
    publish(store, "runs/gpt", 50, {"loss": 4.0})
    publish(store, "runs/gpt", 50, {"loss": 3.5})
    publish(store, "runs/gpt", 60, {"lr": 0.5})
    publish(store, "runs/gpt", 70, {"loss": 2.0})
    store.tag("best", "runs/gpt")
    store.pin("runs/gpt@30", reason="paper", owner="ada")
    store.branch("runs/child", "runs/gpt@60")
    publish(store, "runs/child", 70, {"loss": 1.5})


def series(browser: TestClient, store: Store, name: str, *metrics: str) -> dict[str, Any]:
    query = {"name": name, "metric": list(metrics)}
    found: dict[str, Any] = browser.get(f"/stores/{store.engine.config.uuid}/ref/series", params=query).raise_for_status().json()
    return found


def text_of(browser: TestClient, store: Store, **query: Any) -> str:
    return browser.get(f"/stores/{store.engine.config.uuid}/ref", params=query).raise_for_status().text


def points(part: dict[str, Any]) -> list[tuple[int, float | None]]:
    assert len(part["roots"]) == len(part["steps"])
    return list(zip(part["steps"], part["values"], strict=True))


def test_the_line_is_what_leads_to_the_head_and_the_rest_is_abandoned(client: Client, store: Store) -> None:
    difficult(store)
    browser = enter(client())
    found = series(browser, store, "runs/gpt", "loss")
    (chart,) = found["charts"]
    assert points(chart["line"]) == [(10, 9.0), (20, 8.0), (30, 5.5), (40, None), (50, 3.5), (70, 2.0)]
    assert [points(run) for run in chart["abandoned"]] == [[(30, 7.0), (40, 6.0), (50, None)], [(50, 4.0)]]
    lost = [(each["step"], each["value"], each["abandoned"]) for each in chart["not_finite"]]
    assert lost == [(50, "nan", True), (40, "inf", False)]
    assert {(note["kind"], note["step"], note["text"].partition(", ")[0]) for note in found["notes"]} == {
        ("mark", 50, "marked bad: NaN"),
        ("back", 20, f"reset from step 50 by {store.engine.log._actor}".replace("two:2", "one:1")),
        ("back", 50, "went back from step 50 to save step 50"),
        ("restart", 20, "ada@two:2 went on"),
        ("tag", 70, "tag best"),
        ("pin", 30, "pinned by ada: paper"),
    }
    child = series(browser, store, "runs/child", "loss", "lr")  # begins with what it came from
    loss, lr = child["charts"]
    assert points(loss["line"]) == [(10, 9.0), (20, 8.0), (30, 5.5), (40, None), (50, 3.5), (70, 1.5)]
    assert points(lr["line"]) == [(10, 1.0), (20, 1.0), (60, 0.5)]
    assert loss["abandoned"] == []
    assert ("branch", 60, "branched from runs/gpt") in [(note["kind"], note["step"], note["text"]) for note in child["notes"]]


def test_steps_without_an_order_and_snapshots_without_a_step(client: Client, store: Store) -> None:
    for value in (3.0, 2.0, math.nan, 1.0):
        publish(store, "runs/none", None, {"loss": value})
    for step in (100, 300, 200, 400):
        publish(store, "runs/mixed", step, {"loss": float(step)})
    browser = enter(client())
    (chart,) = series(browser, store, "runs/none", "loss")["charts"]
    assert points(chart["line"]) == [(0, 3.0), (1, 2.0), (2, None), (3, 1.0)]
    (chart,) = series(browser, store, "runs/mixed", "loss")["charts"]
    assert points(chart["line"]) == [(100, 100.0), (200, 200.0), (400, 400.0)]
    assert [points(run) for run in chart["abandoned"]] == [[(300, 300.0)]]


def test_runs_that_were_left_behind_have_rising_steps_and_saves_without_a_parent_go_on(client: Client, store: Store) -> None:
    for step in (10, 20, 30, 15, 25):
        publish(store, "runs/gpt", step, {"loss": float(step)})
    store.reset("runs/gpt", "runs/gpt@10")
    publish(store, "runs/gpt", 40, {"loss": 40.0})
    for step in (1, 2, 3):
        store.put_snapshot({"x": step}, ref="runs/orphans", step=step, metrics={"loss": float(step)}, parent=None)
    browser = enter(client())
    (chart,) = series(browser, store, "runs/gpt", "loss")["charts"]
    assert chart["line"]["steps"] == [10, 40]
    assert [run["steps"] for run in chart["abandoned"]] == [[20, 30], [15, 25]]
    (chart,) = series(browser, store, "runs/orphans", "loss")["charts"]
    assert chart["line"]["steps"] == [1, 2, 3]


def test_forgotten_snapshots_and_removed_branches_are_drawn(client: Client, store: Store) -> None:
    difficult(store)
    browser = enter(client())
    before = series(browser, store, "runs/gpt", "loss")["charts"][0]["line"]
    store.forget("runs/gpt@10")
    assert series(browser, store, "runs/gpt", "loss")["charts"][0]["line"] == before
    text = text_of(browser, store, name="runs/gpt", state="forgotten")
    assert "1 forgotten saves" in text
    store.forget("runs/child")
    assert "does not exist any more" in text_of(browser, store, name="runs/child")


def test_the_graph_has_lines_that_leave_and_come_back(client: Client, store: Store) -> None:
    difficult(store)
    text = text_of(enter(client()), store, name="runs/gpt")
    graph = text.split('<table class="graph">')[1].split("</table>")[0]
    rows = [row.split("</tr>")[0] for row in graph.split("<tr")[1:]]
    steps = [row.split('class="number">')[1].split("<")[0] for row in rows if "<circle" in row]
    assert steps == ["70", "70", "60", "50", "40", "30", "50", "30", "20", "10"]
    tracks = [row.split('cx="')[1].split('"')[0] for row in rows if "<circle" in row]
    assert tracks == ["29", "11", "11", "29", "11", "11", "29", "29", "11", "11"]
    assert graph.count('<path class="abandoned" d="M29 0C') == 2
    assert "runs/child" in rows[1]
    assert "best" in rows[2]
    assert text.count(">live, abandoned<") + text.count("live, abandoned ") == 4


def test_the_table_has_pages_and_says_why_each_is_kept(client: Client, store: Store) -> None:
    for step in range(1, 121):
        publish(store, "runs/gpt", step, {"loss": math.nan if step == 120 else 1.0, "<script>": 1.0})
    store.tag("first", "runs/gpt@1")
    store.set_policy("runs/*", keep_last=2)
    browser = enter(client())
    text = text_of(browser, store, name="runs/gpt")
    assert text.count('name="old"') == 50
    assert "Page 1 of 3" in text
    assert '<span class="bad">nan</span>' in text
    last = text_of(browser, store, name="runs/gpt", page=3, metric="<script>")
    assert last.count('name="old"') == 20
    assert '<span class="badge tag">first</span>' in last
    assert "<script>" not in last.replace("<script src", "").replace("</script>", "")
    assert "Kept by" not in text
    kept = text_of(browser, store, name="runs/gpt", kept="yes")
    assert kept.count("goes:") == 48
    assert "keep_last" in kept


def test_a_metric_is_added_to_those_that_are_drawn(client: Client, store: Store) -> None:
    publish(store, "runs/gpt", 1, {"acc": 1.0, "val_loss": 1.0, "loss": 1.0, "zeta": 1.0})
    browser = enter(client())
    assert "metric=loss&amp;metric=val_loss" in text_of(browser, store, name="runs/gpt")
    assert "metric=acc&amp;metric=zeta" in text_of(browser, store, name="runs/gpt", metric="acc", add="zeta")
    assert series(browser, store, "runs/gpt", *(f"m{number}" for number in range(20)))["charts"][7]["metric"] == "m7"


def test_other_names(client: Client, store: Store) -> None:
    root = publish(store, "runs/gpt", 1)
    store.tag("best", root)
    browser = enter(client())
    path = f"/stores/{store.engine.config.uuid}/ref"
    assert browser.get(path, params={"name": "best"}, follow_redirects=False).headers["location"].endswith("/snapshot?at=best")
    assert browser.get(path, params={"name": "<b>none"}).status_code == 404
    assert "&lt;b&gt;none" in browser.get(path, params={"name": "<b>none"}).text
    assert browser.get(path).status_code == 400
    assert "have no metrics" in browser.get(path, params={"name": "runs/gpt"}).text


# --- in a browser -----------------------------------------------------------------------------------------------------

DRAWN = """
() => [...document.querySelectorAll('.chart')].map((at) => {
  const plot = at.uplot, line = [];
  const pixel = (x, y) => [...plot.ctx.getImageData(Math.round(x), Math.round(y), 1, 1).data];
  plot.data[0].forEach((step, index) => {
    const value = plot.data[1][index];
    if (value != null) line.push([step, value, pixel(plot.valToPos(step, 'x', true), plot.valToPos(value, 'y', true))]);
  });
  const isRed = ([red, green, blue, alpha]) => alpha > 100 && red > blue + 80 && red > green + 80;
  const column = (step) => {
    const x = Math.round(plot.valToPos(step, 'x', true)), { top, height } = plot.bbox;
    const strip = plot.ctx.getImageData(x - 1, Math.round(top), 3, Math.round(height)).data;
    let red = 0;
    for (let at = 0; at < strip.length; at += 4) red += isRed(strip.subarray(at, at + 4));
    return red;
  };
  return { data: plot.data.map((each) => [...each]), line, red: { 40: column(40), 70: column(70) } };
})
"""
BLUE = (37, 87, 167)


@pytest.mark.slow
def test_what_is_drawn_is_the_data(open_page: Open, client: Client, store: Store) -> None:
    difficult(store)
    page = open_page(f"/stores/{store.engine.config.uuid}/ref?name=runs/gpt", viewport={"width": 1280, "height": 900})
    page.locator(".chart .uplot").wait_for()
    for box in page.locator("[name=notes]").all():  # their lines would cross
        box.uncheck()
    (drawn,) = page.evaluate(DRAWN)
    (chart,) = series(enter(client()), store, "runs/gpt", "loss")["charts"]
    steps = drawn["data"][0]
    for part, values in zip((chart["line"], *chart["abandoned"]), drawn["data"][1:], strict=True):
        assert [(step, value) for step, value in zip(steps, values, strict=True) if value is not None] == [
            point for point in points(part) if point[1] is not None
        ]
    assert steps == [10, 20, 30, 40, 50, 70]
    assert len(drawn["line"]) == 5
    for step, _, pixel in drawn["line"]:
        near = sum(abs(found - wanted) for found, wanted in zip(pixel, BLUE, strict=False)) < 120 or pixel == [255, 255, 255, 255]
        assert (pixel[3] > 200 and near) or step == 50, (step, pixel)  # there the red line of an abandoned NaN crosses
    assert drawn["red"]["40"] > 20
    assert drawn["red"]["70"] == 0


@pytest.mark.slow
def test_controls_of_the_charts(open_page: Open, store: Store) -> None:
    difficult(store)
    page = open_page(f"/stores/{store.engine.config.uuid}/ref?name=runs/gpt", viewport={"width": 375, "height": 800}, color_scheme="dark")
    page.locator(".chart .uplot").wait_for()
    assert page.get_by_role(
        "img", name="loss: 5 values, 2 at step 70, lowest 2, highest 9; 2 NaN or infinite; 2 abandoned runs"
    ).is_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.get_by_role("checkbox", name="Abandoned").uncheck()
    page.get_by_role("checkbox", name="Log scale").check()
    assert page.evaluate("document.querySelector('.chart').uplot.series.map((each) => each.show)") == [True, True, False, False]
    assert page.evaluate("document.querySelector('.chart').uplot.scales.y.distr") == 3
    page.route("**/snapshot?*", lambda route: route.fulfill(body="a snapshot"))
    page.locator(".u-over").scroll_into_view_if_needed()
    box = page.locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 20)
    page.get_by_text("step 10: 9").wait_for()
    page.mouse.click(box["x"] + 2, box["y"] + 20)
    page.wait_for_url("**/snapshot?at=*")

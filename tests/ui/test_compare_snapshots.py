"""The page of two snapshots: what differs, by how much, and metrics of both over each other."""

import math
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from starlette.testclient import TestClient

import tensorstore_ck as tsck
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.store import Store
from tensorstore_ck.ui import Sources, make_app
from tests.ui.conftest import ACCESS, BASE, Open, enter
from tests.ui.test_snapshot import read, url_of, words

OLD: dict[str, Any] = {
    "model": {
        "same": torch.ones(2000),
        "little": torch.ones(2000),
        "much": torch.ones(2000),
        "nan": torch.ones(2000),
        "gone": torch.ones(3),
    },
    "optimizer": {"m": torch.ones(2000), "shape": torch.ones(4)},
    "lr": 0.5,
    "text": "old " * 100,
    "epoch": 1,
    "still": torch.tensor([math.nan, 1, 1, 1]),
}


def changed() -> dict[str, Any]:
    nan = torch.ones(2000)
    nan[:3] = math.nan
    return {
        "model": {
            "same": torch.ones(2000),
            "little": torch.ones(2000) * 1.25,
            "much": torch.ones(2000) * 5,
            "nan": nan,
            "<b>": torch.ones(2),
        },
        "optimizer": {"m": torch.ones(2000) * 2, "shape": torch.ones(8)},
        "lr": 0.25,
        "text": "new " * 100,
        "epoch": 1,
        "still": still_nan(1.5),
    }


def still_nan(value: float) -> torch.Tensor:
    """Its NaN is the same in both, so its change is finite."""
    found = torch.full((4,), value)
    found[0] = math.nan
    return found


@pytest.fixture
def pair(store: Store) -> tuple[str, str]:
    old = store.put_snapshot(OLD, ref="runs/a", step=1, metrics={"loss": 2.0, "acc": math.nan, "only": 1.0})
    new = store.put_snapshot(changed(), ref="runs/b", step=5, metrics={"loss": 1.5, "acc": 0.5})
    return old.root, new.root


def rows(text: str, label: str) -> list[list[str]]:
    body = text.split(f'aria-label="{label}"')[1].split("</table>", maxsplit=1)[0]
    return [[words(cell).strip() for cell in re.split("</t[hd]>", row)[:-1]] for row in body.split("<tr>")[2:]]


def test_what_differs_between_two_snapshots(browser: TestClient, store: Store, pair: tuple[str, str]) -> None:
    text = read(browser, url_of(store, "compare", old="runs/a", new=pair[1]))
    assert [row[:4] for row in rows(text, "Groups")] == [["model", "3", "1", "1"], ["optimizer", "2", "0", "0"], ["still", "1", "0", "0"]]
    found = {row[0]: row[1:] for row in rows(text, "Tensors that differ")}
    assert found["model.gone"][0] == "removed"
    assert found["model.<b>"][0] == "added"
    assert found["model.much"] == ["changed", "float32 2000", "the same form", "7.8 KiB"]
    assert found["optimizer.shape"][:3] == ["changed", "float32 4", "float32 8"]
    assert "model.same" not in found
    assert "<b>" not in text
    values = {row[0]: row[1:] for row in rows(text, "Values that differ")}
    assert values["lr"] == ["changed", "0.5", "0.25"]
    assert set(values) == {"lr", "text"}
    assert [browser.get(unescape(url)).text[:4] for url in re.findall(r"href=\"([^\"]*)\">all 400 characters", text)] == ["old ", "new "]
    assert rows(text, "Metrics") == [
        ["acc", "NaN", "0.5", "\N{EN DASH}"],
        ["loss", "2", "1.5", "-0.5"],
        ["only", "1", "\N{EN DASH}", "\N{EN DASH}"],
    ]
    filtered = read(browser, url_of(store, "compare/tensors", old=pair[0], new=pair[1], q="Shape"))
    assert [row[0] for row in rows(filtered, "Tensors that differ")] == ["optimizer.shape"]
    same = words(read(browser, url_of(store, "compare", old=pair[0], new=pair[0])))
    assert "All 8 tensors are the same" in same
    assert "All 3 values are the same" in same


def test_by_how_much_tensors_changed(browser: TestClient, store: Store, pair: tuple[str, str]) -> None:
    text = read(browser, url_of(store, "compare/changes", old=pair[0], new=pair[1]))
    found = rows(text, "Changes of all tensors")
    assert [row[:3] for row in found] == [
        ["model.nan", "changed", "inf"],
        ["still", "changed", "0.5"],
        ["model.much", "changed", "4"],
        ["optimizer.m", "changed", "1"],
        ["model.little", "changed", "0.25"],
        ["optimizer.shape", "reshaped", "\N{EN DASH}"],
        ["model.<b>", "added", "\N{EN DASH}"],
        ["model.gone", "removed", "\N{EN DASH}"],
    ]
    assert found[0][4] == "3"
    assert '<span class="bad">The new ones have 4 NaN and 0 infinite elements.</span>' in text
    one = rows(read(browser, url_of(store, "compare/changes", old=pair[0], new=pair[1], group="optimizer")), "Changes of optimizer")
    assert [row[0] for row in one] == ["optimizer.m", "optimizer.shape"]
    assert "neither has a tensor" in read(browser, url_of(store, "compare/changes", old=pair[0], new=pair[1], group="nothing"))


def test_long_lists_come_in_pages(browser: TestClient, store: Store) -> None:
    for step in (1, 2):
        state = {"t": {f"n{i}": torch.ones(1) * step for i in range(80)}, "v": {f"k{i}": step for i in range(80)}}
        store.put_snapshot(state, ref="r", step=step)
    first = read(browser, url_of(store, "compare", old="r@1", new="r@2"))
    later = read(browser, url_of(store, "compare/tensors", old="r@1", new="r@2", first=50, first_value=50))
    for label in ("Tensors that differ", "Values that differ"):
        shown = [row[0] for text in (first, later) for row in rows(text, label)]
        assert (len(shown), len(set(shown))) == (80, 80)
    assert "51 \N{EN DASH} 80 of 80" in later
    changes = [read(browser, url_of(store, "compare/changes", old="r@1", new="r@2", first=number)) for number in (0, 50)]
    assert [len(rows(text, "Changes of all tensors")) for text in changes] == [50, 30]


def test_addresses_that_lead_nowhere_keep_what_is_known(
    store: Store, tmp_path: Path, pair: tuple[str, str], sources: Callable[..., Sources]
) -> None:
    with tsck.open(tmp_path / "other", create=True, no_sync=True, cache_dir=tmp_path / "cache") as other:
        elsewhere = other.put_snapshot({"w": torch.ones(1)}, ref="runs/x").root
        browser = enter(TestClient(make_app(sources(store.url, other.url), ACCESS), base_url=BASE))
        browser.get("/")
    page = browser.get(url_of(store, "compare", old="runs/nothing", new=pair[1]))
    assert page.status_code == 404
    assert "there is no ref or snapshot" in page.text
    assert 'aria-describedby="error-old"' in page.text
    assert "runs/b step 5" in words(page.text)
    assert f"of another store, {other.url}" in browser.get(url_of(store, "compare", old=elsewhere, new=pair[1])).text
    empty = browser.get(url_of(store, "compare"))
    assert (empty.status_code, "Snapshots of different stores are not compared" in empty.text) == (200, True)
    assert "runs/b step 5" in words(browser.get(url_of(store, "compare", new=pair[1])).text)


def test_one_that_is_gone_and_a_damaged_one(browser: TestClient, store: Store, pair: tuple[str, str]) -> None:
    gone = store.put_snapshot({"w": torch.ones(2000) * 3}, ref="runs/gone", metrics={"loss": 9.0})
    store.forget("runs/gone")
    store.gc(GcOptions(undo_window_seconds=0, min_age_seconds=0, max_delete=1))
    text = browser.get(url_of(store, "compare", old=gone.root, new=pair[1])).text
    assert "runs/gone is gone, so its tensors and values cannot be compared" in text
    assert ["loss", "9", "1.5", "-7.5"] in rows(text, "Metrics")
    assert browser.get(url_of(store, "compare/changes", old=gone.root, new=pair[1])).status_code == 404
    for part in (Path(store.url) / "parts").rglob("*"):
        if part.is_file():
            part.write_bytes(part.read_bytes()[:-1])
    text = read(browser, url_of(store, "compare", old=pair[0], new=pair[1]))
    assert "They cannot be compared now" in text
    assert ["loss", "2", "1.5", "-0.5"] in rows(text, "Metrics")


@pytest.mark.slow
def test_the_drawn_lines_are_the_metrics_of_both_branches(open_page: Open, store: Store) -> None:
    for ref, steps in {"runs/a": (3, 1, 2), "runs/b": (2, 5)}.items():  # log order is not step order
        for step in steps:
            loss = math.nan if (ref, step) == ("runs/b", 5) else step + (0.5 if ref == "runs/b" else 0)
            state = {"w": torch.ones(2000) * step, "ref": ref}
            store.put_snapshot(state, ref=ref, step=step, metrics={"loss": loss}, unchanged="ok")
    page = open_page(url_of(store, "compare", old="runs/a", new="runs/b"))
    page.locator("#overlays canvas").wait_for()
    drawn = page.evaluate("document.querySelector('#overlays .chart').uplot.data.map((each) => [...each])")
    assert drawn[0][-1] == 5
    assert dict(zip(drawn[0], drawn[2], strict=True))[2] == 2.5
    assert dict(zip(drawn[0], drawn[1], strict=True))[2] == 2
    page.get_by_text("Read all tensors that differ").click()
    page.get_by_role("heading", name="By relative change").wait_for()
    page.get_by_label("Old:").fill("runs/a@")
    page.locator("#addresses-old option[value='runs/a@3']").wait_for(state="attached")
    assert "w" in page.locator("#changes table").inner_text()

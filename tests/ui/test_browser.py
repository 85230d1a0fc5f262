"""The pages in a real browser: what happens between them."""

import shutil
from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.store import Store
from tests.catalog.made import publish
from tests.ui.conftest import Open

pytestmark = pytest.mark.slow

CHART_STEPS = "document.querySelector('.chart')?.uplot?.data[0].length"


def test_back_after_a_piece_was_replaced_shows_the_page_as_it_was(open_page: Open, store: Store) -> None:
    for step in range(60):
        publish(store, "runs/gpt", step, {"loss": 1.0})
    page = open_page(f"/stores/{store.engine.config.uuid}/ref?name=runs/gpt")
    saves = page.locator("#saves tbody tr")
    page.locator(".uplot").first.wait_for()
    first = saves.first.text_content()
    page.locator("#saves").get_by_role("link", name="Older").click()
    page.get_by_text("page 2 of 2").wait_for()
    assert saves.count() == 10
    assert page.evaluate(CHART_STEPS) == 60
    page.go_back()
    page.get_by_text("page 1 of 2").wait_for()
    assert saves.first.text_content() == first
    page.locator(".uplot").first.wait_for()
    assert page.evaluate(CHART_STEPS) == 60
    page.go_forward()
    page.get_by_text("page 2 of 2").wait_for()
    page.locator(".uplot").first.wait_for()
    assert page.evaluate(CHART_STEPS) == 60


def test_a_store_that_vanishes_while_its_page_is_open(open_page: Open, store: Store, tmp_path: Path) -> None:
    publish(store, "runs/gone", 1)
    with tsck.open(tmp_path / "other", create=True, no_sync=True, cache_dir=tmp_path / "cache") as other:
        publish(other, "runs/there", 1)
        page = open_page(f"/stores/{store.engine.config.uuid}/space", store.url, other.url)
        shutil.rmtree(tmp_path / "store")
        page.get_by_role("button", name="Measure").click()
        page.get_by_role("alert").wait_for()
        assert "could not be measured" in page.get_by_role("alert").text_content()
        page.reload()
        assert "This page shows what was read before" in page.get_by_role("status").first.text_content()
        page.get_by_role("link", name="Overview").click()
        page.get_by_role("status").filter(has_text="cannot be read now").wait_for()
        assert page.get_by_role("rowheader", name="runs/gone").is_visible()
        publish(other, "runs/new", 1)
        page.reload()
        page.get_by_role("link", name="runs/new").click()
        page.get_by_role("heading", name="runs/new").wait_for()
        assert page.locator(".notice").count() == 0

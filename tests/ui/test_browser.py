"""The pages in a real browser."""

import pytest

from tensorstore_ck.store import Store
from tests.catalog.made import publish
from tests.ui.conftest import Open

pytestmark = pytest.mark.slow


def test_the_overview_in_a_browser(open_page: Open, store: Store) -> None:
    publish(store, "runs/gpt", 1)
    page = open_page("/")
    assert page.title() == "Overview · tsck"
    assert page.get_by_role("rowheader", name="runs/gpt").is_visible()

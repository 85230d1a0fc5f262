"""The pictures in docs/guides/ui.md, one of each page. They are made again by

pytest tests/ui/test_screenshots.py --screenshots docs/pictures/ui
"""

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest
from PIL import Image

from tensorstore_ck.ui import app
from tests.documents import DOCS, text
from tests.ui import site as pages
from tests.ui.made import TRAINING_UUID
from tests.ui.site import Site, serving_after_training

PICTURES: Final = DOCS / "pictures" / "ui"
GUIDE: Final = DOCS / "guides" / "ui.md"
WIDTH: Final = 1280
MOST_BYTES: Final = 150_000


@dataclass(frozen=True)
class Picture:
    """What is shown of a page."""

    query: dict[str, str | list[str]]
    height: int
    """The most pixels, from the top."""
    act: Callable[[Any], object] = lambda page: None
    """What somebody does on the page before."""


def _measure(page: Any) -> None:
    page.get_by_role("button", name="Measure").click()
    page.get_by_role("img", name="Live").wait_for()


def _check(page: Any) -> None:
    page.get_by_role("button", name="Check").click()
    page.get_by_role("button", name="Check again").wait_for()


def _read_statistics(page: Any) -> None:
    for group in ("model", "head"):
        page.locator("summary", has=page.get_by_text(group, exact=True)).click()
    page.get_by_role("link", name="Statistics of model.head.weight").click()
    page.locator(".histogram rect").first.wait_for()
    page.get_by_text("keep_every", exact=True).wait_for()


def _filter_tensors(page: Any) -> None:
    page.get_by_label("Names that contain").fill("model.layers.0")
    page.get_by_text("2 match").wait_for()


SHOWN: Final[dict[str, Picture]] = {
    "overview": Picture({}, 562),
    "runs": Picture({"run": ["runs/gpt", "runs/gpt-slow", "runs/bert"]}, 880),
    "find": Picture({"q": "val_loss < 3 and ref like 'runs/gpt%'", "order": "val_loss"}, 640),
    "activity": Picture({}, 640),
    "ref": Picture({"name": "runs/gpt"}, 1240),
    "snapshot": Picture({"at": "runs/gpt@400"}, 1560, _read_statistics),
    "compare": Picture({"old": "runs/gpt-slow", "new": "runs/gpt"}, 1840, _filter_tensors),
    "space": Picture({}, 1640, _measure),
    "health": Picture({}, 1044, _check),
}
NOT_SHOWN: Final = {"forgotten"}
"""A list that is mostly short."""


def path_of(name: str) -> str:
    query = f"?{urlencode(SHOWN[name].query, doseq=True)}" if SHOWN[name].query else ""
    if name == "overview":
        return f"/{query}"
    return f"/{name}{query}" if name in app.OF_ALL else f"/stores/{TRAINING_UUID}/{name}{query}"


@pytest.fixture(scope="module")
def served(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving_after_training(chromium, tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_page_can_be_shown(served: Site, name: str, pytestconfig: pytest.Config) -> None:
    shown = SHOWN[name]
    page = served.new_page(viewport={"width": WIDTH, "height": 900}, color_scheme="light", reduced_motion="reduce")
    served.go(page, path_of(name))
    shown.act(page)
    served.settle(page)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    height = min(page.evaluate("document.querySelector('main').getBoundingClientRect().bottom"), shown.height)
    png = page.screenshot(full_page=True, clip={"x": 0, "y": 0, "width": WIDTH, "height": height}, animations="disabled")
    page.context.close()
    assert not served.problems
    folder = pytestconfig.getoption("--screenshots")
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with Image.open(io.BytesIO(png)) as picture:
            picture.convert("RGB").save(Path(folder) / f"{name}.webp", lossless=True, method=6)


def test_the_guide_shows_each_page() -> None:
    names = {name or "overview" for name in (*app.OF_ALL, *app.OF_A_STORE) if pages.is_page(name)}
    assert names == SHOWN.keys() | NOT_SHOWN
    assert {path.stem for path in PICTURES.iterdir()} == SHOWN.keys()
    for name in SHOWN:
        assert text(GUIDE).count(f"](../pictures/ui/{name}.webp)") == 1, name
        picture = PICTURES / f"{name}.webp"
        assert picture.stat().st_size < MOST_BYTES, name
        with Image.open(picture) as opened:
            assert opened.width == WIDTH, name

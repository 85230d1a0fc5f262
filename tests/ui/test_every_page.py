"""What holds for every page, in a real browser: accessible, as wide as the screen, usable with a keyboard, and deaf to markup in names.

Each page is opened once, and looked at in many ways: opening them takes most of the time.
"""

from collections.abc import Iterator
from typing import Any, Final

import pytest
from axe_playwright_python.base import AXE_SCRIPT

from tensorstore_ck.ui import app
from tests.ui import site as pages
from tests.ui.site import Site, serving

pytestmark = pytest.mark.slow

WIDTHS: Final = (375, 640, 768, 1280, 3840)
"""640 is a window of 1280 at a zoom of 200 %."""
IS_WIDE: Final = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
WIDE: Final = """[...document.querySelectorAll("body *")].filter((e) => e.clientWidth > 0 && e.scrollWidth > e.clientWidth + 1
    && getComputedStyle(e).overflowX === "visible").map((e) => e.outerHTML.slice(0, 120)).slice(-3)"""
DRAWN: Final = "new Promise(requestAnimationFrame).then(() => new Promise(requestAnimationFrame))"
STOPS: Final = """new Set([...document.querySelectorAll(
    "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex='0']"
)].filter((e) => e.checkVisibility()).map((e) => e.type === "radio" ? e.name : e)).size"""
FOCUS_IS_SEEN: Final = """(() => {
    const style = getComputedStyle(document.activeElement), box = document.activeElement.getBoundingClientRect();
    const isSeen = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2 && box.bottom > 0 && box.top < innerHeight;
    return isSeen ? "" : document.activeElement.outerHTML.slice(0, 150);
})()"""
FOCUS_HAS_MOVED: Final = """new Promise((done) => {
    const look = () => document.activeElement === window.lastStop ? requestAnimationFrame(look) : done();
    look();
})"""
MOVING: Final = "[...document.querySelectorAll('*')].filter((e) => getComputedStyle(e).transitionDuration !== '0s').length"
AXE: Final = """(rules) => axe.run({
    resultTypes: ["violations"],
    runOnly: rules ?? ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"],
}).then((found) => found.violations.flatMap(
    (each) => each.nodes.slice(0, 3).map((node) => [each.id, node.html.slice(0, 200), node.failureSummary])
))"""
BY_COLOUR: Final = ["color-contrast", "link-in-text-block"]

Findings = dict[str, list[tuple[object, ...]]]


@pytest.fixture(scope="module")
def served(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with serving(chromium, tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture(scope="module")
def findings(served: Site) -> Findings:
    """What is wrong with any page, by kind."""
    page = served.new_page(reduced_motion="reduce", bypass_csp=True)  # only axe needs that
    found: Findings = {}
    for path in served.paths():
        page.set_viewport_size({"width": 1280, "height": 900})
        page.emulate_media(color_scheme="light", media="screen")
        served.go(page, path)

        def note(kind: str, *what: object, path: str = path) -> None:
            found.setdefault(kind, []).append((path, *what))

        _use_keyboard(page, note)
        page.evaluate("for (const each of document.querySelectorAll('details')) each.open = true")
        served.settle(page)
        if page.evaluate("window.owned") is not None or page.locator("img[src='x']").count() or "49 \N{PILE OF POO}" in page.content():
            note("names")
        if page.evaluate(MOVING):
            note("motion")
        _resize(page, note)
        _run_axe(page, note)
        page.emulate_media(media="print")
        if page.locator(".top").is_visible() or not page.locator("h1").is_visible():
            note("print")
    page.context.close()
    found["console"] = [(each,) for each in served.problems if "status of 40" not in each]
    served.problems.clear()
    return found


def _use_keyboard(page: Any, note: Any) -> None:
    stops = page.evaluate(STOPS)
    _press_tab(page)
    if page.evaluate("document.activeElement.className") != "skip" or page.locator(".skip").bounding_box()["x"] < 0:
        note("keyboard", "the first stop is not the link that skips the navigation")
    seen = 0
    while page.evaluate("document.activeElement !== document.body") and seen <= stops:
        unseen = page.evaluate(FOCUS_IS_SEEN)
        if unseen:
            note("keyboard", "focus is not seen", unseen)
        _press_tab(page)
        seen += 1
        if page.evaluate("document.activeElement.className") == "skip":  # after the last comes the first, in some windows at once
            break
    if seen != stops:
        note("keyboard", f"{seen} of {stops} stops", page.evaluate("document.activeElement.outerHTML.slice(0, 150)"))
    page.evaluate("document.activeElement.blur()")


def _press_tab(page: Any) -> None:
    """Waits until the focus has moved, which takes a while from the last stop to the first, through the browser's own window."""
    page.evaluate("window.lastStop = document.activeElement")
    page.keyboard.press("Tab")
    page.evaluate(FOCUS_HAS_MOVED)


def _resize(page: Any, note: Any) -> None:
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.evaluate(DRAWN)
        if page.evaluate(IS_WIDE):
            note("wide", width, page.evaluate(WIDE))
    page.set_viewport_size({"width": 1280, "height": 900})
    page.evaluate("document.documentElement.style.fontSize = '200%'")
    if page.evaluate(IS_WIDE):
        note("wide", "text at 200 %", page.evaluate(WIDE))
    page.evaluate("document.documentElement.style.fontSize = ''")


def _run_axe(page: Any, note: Any) -> None:
    """All rules at one width in light and at the other in dark; those of colours also the other way round."""
    page.evaluate(AXE_SCRIPT)
    for scheme, width, rules in (("light", 1280, None), ("light", 375, BY_COLOUR), ("dark", 375, None), ("dark", 1280, BY_COLOUR)):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=scheme)
        page.evaluate(DRAWN)
        for each in page.evaluate(AXE, rules):
            note("axe", scheme, width, *each)


def test_every_page_is_looked_at(served: Site) -> None:
    assert set(filter(pages.is_page, app.OF_ALL)) == pages.OF_ALL.keys()
    for store in served.stores.values():
        assert set(filter(pages.is_page, app.OF_A_STORE)) == pages.of_a_store(store).keys()


@pytest.mark.parametrize("kind", ["axe", "wide", "keyboard", "names", "motion", "print", "console"])
def test_nothing_is_wrong_with_a_page(findings: Findings, kind: str) -> None:
    lines = [" ".join(map(str, each)) for each in findings.get(kind, [])]
    assert not lines, "\n".join(lines)


def test_the_skip_link_leads_to_the_content(served: Site) -> None:
    page = served.new_page()
    served.go(page, "/")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"

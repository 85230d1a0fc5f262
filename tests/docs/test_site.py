"""The built pages in a real browser, read from a folder without a web server: length, code, search, dark mode, what is two clicks away."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tensorstore_ck.cli.command_groups import GROUPS
from tests.docs.test_pages import QUESTIONS
from tests.documents import REPOSITORY
from tests.effort import PATIENCE_SECONDS

pytestmark = pytest.mark.slow
HIGH: Final = 1000
MOST_SCREENS: Final = 8
LONGER: Final = {"reference/format.html", "requirements.html", "troubleshooting.html"}
"""The text that readers of stores are written from, one table of all requirements, and the one page on which links from errors lead to an
entry. `test_pages.py`: they begin with links to their sections."""
LOOKED_FOR: Final = {
    "disk full": ("guides/operations.html", "a-full-disk"),
    "delete old": ("guides/retention.html", "delete-old-snapshots"),
    "conflict": ("troubleshooting.html", "conflict"),
    "s3 endpoint": ("guides/s3.html", ""),
    "resume": ("guides/resume.html", ""),
}
"""What somebody types into the search -> the first page that is found, and the section."""
FACTS: Final = """() => {
    const content = document.querySelector('.md-content');
    const cut = element => element.scrollWidth > element.clientWidth + 1;
    return {
        height: content.scrollHeight,
        cut: [...content.querySelectorAll('pre code')].filter(cut).map(element => element.textContent.slice(0, 60)),
        links: [...content.querySelectorAll('a[href]')].map(link => link.href.split('#')[0]),
        headings: [...content.querySelectorAll('h1, h2, h3, h4')].map(heading => [heading.id, heading.textContent.replace('¶', '').trim()]),
    };
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` builds."""
    pytest.importorskip("mkdocs", reason="needs mkdocs-material")
    folder = tmp_path_factory.mktemp("site")
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def window(chromium: Any, site: Path) -> Iterator[Any]:
    """A window of a dark desktop. Fails if a page logs an error or asks for anything but files."""
    context = chromium.new_context(viewport={"width": 1440, "height": HIGH}, color_scheme="dark")
    page, problems = context.new_page(), list[str]()
    page.set_default_timeout(PATIENCE_SECONDS * 1000)
    page.on("console", lambda message: problems.append(f"{page.url}: {message.text}") if message.type == "error" else None)
    page.on("pageerror", lambda error: problems.append(f"{page.url}: {error}"))
    page.on("request", lambda request: None if request.url.startswith(("file:", "data:", "about:")) else problems.append(request.url))
    yield page
    context.close()
    assert problems == []


@pytest.fixture(scope="module")
def facts(window: Any, site: Path) -> dict[str, dict[str, Any]]:
    """Of each page, by its path in the site."""
    found = {}
    for path in sorted(site.rglob("*.html")):
        if path.name != "404.html":
            window.goto(path.as_uri())
            found[path.relative_to(site).as_posix()] = window.evaluate(FACTS)
    return found


def test_a_page_has_at_most_eight_screens_and_no_code_is_cut_at_the_right(facts: dict[str, dict[str, Any]]) -> None:
    screens = {name: page["height"] / HIGH for name, page in facts.items()}
    assert {name for name, number in screens.items() if number > MOST_SCREENS} == LONGER
    assert {name: page["cut"] for name, page in facts.items() if page["cut"]} == {}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_two_clicks_from_the_home_page(question: str, facts: dict[str, dict[str, Any]], site: Path) -> None:
    """By links in the text; the navigation of the site is not counted."""
    source, heading = QUESTIONS[question]
    answer = source.replace("README.md", "index.md").removeprefix("docs/").replace(".md", ".html")
    first = {"index.html", *_linked("index.html", facts, site)}
    second = first.union(*(_linked(name, facts, site) for name in first))
    assert answer in second
    assert heading in [text for _, text in facts[answer]["headings"]]


def _linked(name: str, facts: dict[str, dict[str, Any]], site: Path) -> set[str]:
    links = {link.removeprefix(f"{site.as_uri()}/") for link in facts[name]["links"]}
    return links & facts.keys()


def test_each_command_is_on_the_page_of_its_group(facts: dict[str, dict[str, Any]]) -> None:
    for group, (_, commands) in GROUPS.items():
        headings = {identity for identity, _ in facts[f"cli/{group}.html"]["headings"]}
        assert {f"tsck-{command}" for command in commands} <= headings


@pytest.mark.parametrize("query", LOOKED_FOR)
def test_a_search_finds_the_page_first(query: str, window: Any, site: Path) -> None:
    name, section = LOOKED_FOR[query]
    window.goto((site / "index.html").as_uri())
    window.get_by_placeholder("Search").press_sequentially(query)
    found = window.locator(".md-search-result__item").first
    found.wait_for()
    addresses = [link.get_attribute("href").partition("?")[0] for link in found.locator("a").all()]
    assert addresses[0] == (site / name).as_uri()
    if section:
        sections = found.locator(f"a[href*='#{section}']").all()
        assert sections, query


def test_the_desktop_chooses_dark_pages_and_a_click_light_ones(window: Any, site: Path) -> None:
    window.goto((site / "index.html").as_uri())
    ground = "parseInt(getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0])"
    assert window.evaluate(ground) < 60
    window.get_by_title("Light").click()
    window.wait_for_function(f"{ground} > 200")

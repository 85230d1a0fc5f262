"""What a newcomer asks is two clicks from README.md, links lead somewhere, and the pages agree with the code and the results."""

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.store import ReadOnlyStore, Store
from tests import documents
from tests.documents import DOCS, PAGES, README, REPOSITORY, text

QUESTIONS = {
    "How do I install it, and how do I get torch without CUDA?": ("README.md", "Install"),
    "How do I save and resume in my own loop?": ("docs/quickstart.md", "A training script"),
    "What does my Lightning module need?": ("docs/trainers/lightning.md", "Lightning"),
    "How do I give it the endpoint and the keys of my S3 server?": ("docs/guides/s3.md", "Endpoint and keys"),
    "How do I bring my old checkpoints in?": ("docs/guides/import-export.md", "Import and export"),
    "How do I keep the best three and the last five?": ("docs/guides/retention.md", "Policies"),
    "My job says ConflictError: what now?": ("docs/troubleshooting.md", "conflict"),
    "How do I train on another number of GPUs?": ("docs/guides/many-ranks.md", "Many ranks"),
    "How do I save without stopping the training?": ("docs/guides/async-saves.md", "Saves that do not stall training"),
    "How fast is it, and what does it cost?": ("docs/benchmarks.md", "Save and restore"),
}
"""Each with the page and the heading that answers it."""
LONG_WORDS = 1500
"""A page of more words takes four screens and more."""
FOLD = re.compile(r"<details.*?</details>", re.DOTALL)
VISIBLE_WORDS = {"trainers/*.md": 5000, "security.md": 1782, "guides/ui.md": 815}
"""The most words outside folds, of all pages that a pattern names together."""
PACKAGE = REPOSITORY / "tensorstore_ck"


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The file and the anchor of each link to this repository."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]*)\)", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL)):
        path, _, anchor = target.partition("#")
        yield (page.parent / path).resolve() if path else page, anchor


def anchor(heading: str) -> str:
    """What links have after the ``#``."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Of the headings."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL), re.MULTILINE)
    return {anchor(heading) for heading in headings}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_two_clicks_from_the_readme(question: str) -> None:
    name, heading = QUESTIONS[question]
    first = {README} | {target for target, _ in links(README) if target.suffix == ".md"}
    second = first | {target for page in first for target, _ in links(page)}
    assert REPOSITORY / name in second
    assert re.search(rf"^#+ {re.escape(heading)}$", text(REPOSITORY / name), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=[page.relative_to(REPOSITORY).as_posix() for page in PAGES])
def test_links_lead_to_files_and_headings(page: Path) -> None:
    assert [str(target) for target, _ in links(page) if not target.exists()] == []
    assert [(str(target), name) for target, name in links(page) if name and name not in anchors(target)] == []


def test_a_long_page_begins_with_links_to_its_sections() -> None:
    missing = {}
    for page in (*PAGES, PACKAGE / "FORMAT.md", PACKAGE / "gc" / "PROTOCOL.md"):
        start, *sections = re.split(r"^## (.+)$", re.sub(r"```.*?```", "", text(page), flags=re.DOTALL), flags=re.MULTILINE)
        if len(text(page).split()) > LONG_WORDS:
            missing[page.name] = [title for title in sections[::2] if f"(#{anchor(title)})" not in start]
    assert {"FORMAT.md", "troubleshooting.md", "security.md"} <= missing.keys()
    assert not any(missing.values()), missing


@pytest.mark.parametrize("pattern", VISIBLE_WORDS)
def test_pages_say_what_a_reader_needs_and_fold_the_evidence(pattern: str) -> None:
    words = {page.name: len(FOLD.sub("", text(page)).split()) for page in DOCS.glob(pattern)}
    assert words
    assert sum(words.values()) <= VISIBLE_WORDS[pattern], words


def test_the_readme_stays_short_and_every_page_is_in_the_navigation() -> None:
    assert len(text(README).split()) <= 1000  # of these 110 are what commands print
    navigation = set(re.findall(r"[\w/-]+\.md", text(REPOSITORY / "mkdocs.yml").partition("\nnav:\n")[2]))
    assert {page.relative_to(DOCS).as_posix() for page in PAGES if page != README} <= navigation


@pytest.mark.parametrize("name", sorted(tsck.__all__))
def test_every_public_name_is_documented_and_in_the_reference(name: str) -> None:
    """`make docs` fails if a path there leads nowhere."""
    shown = {path for page in (DOCS / "reference").rglob("*.md") for path in re.findall(r"^::: ([\w.]+)$", text(page), re.MULTILINE)}
    exported = getattr(tsck, name)
    if isinstance(exported, ModuleType):
        return
    assert inspect.getdoc(exported)
    if inspect.isclass(exported) or inspect.isfunction(exported):
        assert {exported.__module__, f"{exported.__module__}.{exported.__qualname__}"} & shown
    else:
        assert any(path.endswith(f".{name}") for path in shown)


def test_every_public_method_of_a_store_is_in_the_reference_once() -> None:
    pages = [text(page) for page in (DOCS / "reference").rglob("*.md")]
    shown = [
        path for page in pages for path in re.findall(r"^::: tensorstore_ck\.store\.\w+\.(?:ReadOnly)?Store\.(\w+)$", page, re.MULTILINE)
    ]
    kept_internal = {"url", "close", "engine", "session"}  # the first two are below the class itself
    earlier_names = {name for name in vars(Store) | vars(ReadOnlyStore) if getattr(getattr(Store, name), "__name__", name) != name}
    public = {name for name in vars(Store) | vars(ReadOnlyStore) if not name.startswith("_")} - earlier_names
    assert sorted(shown) == sorted(public - kept_internal)


def test_the_benchmarks_are_those_of_the_results() -> None:
    results = set(documents.text(REPOSITORY / "benches" / "RESULTS.md").splitlines())
    rows = [line for line in text(DOCS / "benchmarks.md").splitlines() if line.startswith("|")]
    assert len(rows) > 40
    assert [row for row in rows if row not in results] == []


def test_the_plots_are_those_of_the_results() -> None:
    script = DOCS / "pictures" / "plot_results.py"
    spec = importlib.util.spec_from_file_location("plot_results", script)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, drawn in module.plots().items():
        assert (script.parent / name).read_text(encoding="utf-8") == drawn

"""The page about security names tests; each of them is there, and no section promises anything without one."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"


@cache
def names_in(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def anchor_of(title: str) -> str:
    return re.sub(r"[^a-z0-9 _-]", "", title.lower()).replace(" ", "-")


def test_each_attacker_leads_to_a_section_and_each_section_to_tests() -> None:
    head, *sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.M)
    texts = {anchor_of(title): text for title, _, text in (section.partition("\n") for section in sections)}
    attackers = re.findall(r"^- (.*)$", head, re.M)
    linked = [re.findall(r"\]\(#([\w-]+)\)", attacker) for attacker in attackers]
    assert all(linked), attackers
    assert {anchor for anchors in linked for anchor in anchors} == texts.keys()
    untested = {anchor for anchor, text in texts.items() if not re.search(r"`tests/[\w/]+\.py", text.partition("<details")[2])}
    assert untested == {"what-is-not-promised"}


def test_each_test_that_the_page_names_exists() -> None:
    names, path = 0, ROOT
    for file, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", PAGE.read_text(encoding="utf-8")):
        path = ROOT / file if file else path
        if file or name:
            assert path.is_file(), file
            assert not name or name in names_in(path), f"{file}::{name}"
            names += 1
    assert names > 100

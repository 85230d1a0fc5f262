"""The page about security names tests; each of them is there."""

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


def test_each_test_that_the_page_names_exists() -> None:
    names, path = 0, ROOT
    for file, name in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", PAGE.read_text(encoding="utf-8")):
        path = ROOT / file if file else path
        if file or name:
            assert path.is_file(), file
            assert not name or name in names_in(path), f"{file}::{name}"
            names += 1
    assert names > 100

"""A contributor's day: each command, file and name that CONTRIBUTING.md names is there."""

import ast
import re
from pathlib import Path

import pytest

from tests import documents
from tests.integrations import conformance

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


def test_every_target_of_make_exists() -> None:
    named = set(re.findall(r"\bmake ([a-z-]+)", TEXT))
    assert len(named) > 8
    assert named <= TARGETS


def test_every_file_and_module_exists() -> None:
    paths = {word for word in re.findall(r"`([\w./-]+/[\w./-]+)`", TEXT) if not word.startswith((".venv", "site"))}
    assert len(paths) > 15
    places = (ROOT, ROOT / "tensorstore_ck", ROOT / "tensorstore_ck/format/codec", ROOT / "tests")
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []
    modules = {word.replace(".", "/") for word in re.findall(r"python -m ((?:benches|tests)[\w.]+)", TEXT)}
    assert modules
    assert [module for module in modules if not (ROOT / f"{module}.py").exists()] == []


@pytest.mark.parametrize("block", BLOCKS)
def test_the_adapter_of_the_page_defines_what_the_class_asks_for(block: str) -> None:
    (shown,) = ast.parse(block).body
    assert isinstance(shown, ast.ClassDef)
    assert [base.id for base in shown.bases if isinstance(base, ast.Name)] == ["AdapterConformance"]
    defined = {each.name: each for each in shown.body if isinstance(each, ast.FunctionDef)}
    assert {*defined} == conformance.AdapterConformance.__abstractmethods__
    asked = ast.parse(Path(conformance.__file__).read_text())
    (kind,) = (each for each in asked.body if isinstance(each, ast.ClassDef) and each.name == "AdapterConformance")
    for method in (each for each in kind.body if isinstance(each, ast.FunctionDef) and each.name in defined):
        assert ast.dump(method.args) == ast.dump(defined[method.name].args)


def test_the_importer_of_the_page_is_the_example() -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
    assert block.strip() in (ROOT / "examples/npz_importer/pyproject.toml").read_text()
    assert len((ROOT / "examples/npz_importer/npz_importer.py").read_text().splitlines()) <= 40


def test_the_pages_of_contributors_are_linked() -> None:
    assert "CONTRIBUTING.md" in documents.text(ROOT / "README.md")

"""ARCHITECTURE.md, the decisions and the code say the same."""

import ast
import dataclasses
import re
import subprocess
import tomllib
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

import tensorstore_ck
from tensorstore_ck.engine.engine import Engine

PACKAGE = Path(tensorstore_ck.__file__).parent
ROOT = PACKAGE.parent
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
PAGES = [
    path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")) if path.parent.name not in ("decisions", "trainers")
]
"""Without those of trainers, which name files of the trainers, too."""
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]


def rows(heading: str) -> list[list[str]]:
    """The cells of the table under a heading, without its first two lines."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines() if line.startswith("| ")][2:]


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text.replace("```", ""))


def python_files() -> Iterator[Path]:
    for top in (PACKAGE, ROOT / "gc", ROOT / "chunker"):
        yield from (path for path in top.rglob("*.py") if "standalone" not in path.parts)


@cache
def defined() -> tuple[set[str], set[str]]:
    """Names of files and classes, and of functions too, in snake case."""
    nouns, names = {path.stem for path in python_files()} | {path.parent.name for path in python_files()}, set()
    for path in python_files():
        for kind, name in re.findall(r"^ *(class|def|async def) (\w+)", path.read_text(), re.MULTILINE):
            if kind == "class":
                nouns.add(re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())
            else:
                names.add(name)
    return nouns, names | nouns


def tracked(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        pytest.skip("not in a git work tree")
    return done.stdout


def test_every_path_exists() -> None:
    named = {path for path in [*quoted(TEXT), *re.findall(r"\]\(([^)#]+)\)", TEXT)] if re.fullmatch(r"[\w.-]+(/[\w.-]*)*", path)}
    paths = {path for path in named if "/" in path or path.endswith((".py", ".md", ".toml"))}
    assert len(paths) > 100
    known = {path.name for path in PACKAGE.rglob("*.md")}
    assert sorted(path for path in paths if not (PACKAGE / path).exists() and not (ROOT / path).exists() and path not in known) == []


@pytest.mark.parametrize(
    "document",
    [
        "tensorstore_ck/FORMAT.md",
        "tensorstore_ck/gc/PROTOCOL.md",
        "tensorstore_ck/chunker/README.md",
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "SECURITY.md",
        *PAGES,
    ],
)
def test_every_path_in_other_documents_exists(document: str) -> None:
    text = (ROOT / document).read_text()
    paths = {path for path in quoted(text) if re.fullmatch(r"[\w.-]+(/[\w.-]+)+\.(py|md|sh)", path)}
    paths |= {path for path in re.findall(r"\]\(([\w./-]+)\)", text) if not path.startswith("..")}
    places = (PACKAGE, ROOT, (ROOT / document).parent)
    assert sorted(path for path in paths if not any((place / path).exists() for place in places)) == []


def test_the_areas_are_those_of_the_import_contract() -> None:
    contract = [
        layer.split(" | ") for layer in next(found for found in CONTRACTS if found.get("containers") == ["tensorstore_ck"])["layers"]
    ]
    table = rows("Areas")
    assert [quoted(area) for area, *_ in table] == contract
    for (_, _, below), (area, *_) in pairwise(table):
        assert quoted(below) == quoted(area)
    without_torch = next(found for found in CONTRACTS if found.get("forbidden_modules") == ["torch"])["source_modules"]
    stated = next(line for line in TEXT.splitlines() if line.startswith("Areas that must not import torch: "))
    assert [f"tensorstore_ck.{area}" for area in quoted(stated)] == without_torch


def test_where_to_look_and_the_glossary_have_their_size() -> None:
    assert len(rows("Where to look for what")) >= 25
    assert len(rows("Glossary")) <= 40
    assert len(TEXT.splitlines()) <= 250


def test_every_word_of_the_glossary_is_a_name_in_the_code() -> None:
    _, names = defined()
    words = [word for word, _ in rows("Glossary")]
    assert words == sorted(words)
    parts = {"_" + name.strip("_") + "_" for name in names}
    unused = [word for word in words if not any(re.search(f"_{word.replace(' ', '_')}(e?s|e?d|ped|ing)?_", name) for name in parts)]
    assert unused == []


def test_files_and_classes_use_no_word_that_the_glossary_rules_out() -> None:
    nouns, _ = defined()
    line = next(line for line in TEXT.splitlines() if line.startswith("Names of files and classes do not use: "))
    ruled_out = set(line.split(": ")[1].split(".")[0].split(", "))
    assert len(ruled_out) >= 5
    assert sorted(noun for noun in nouns if ruled_out & set(noun.split("_"))) == []


def test_decisions_are_cited_by_files_that_exist_and_nothing_cites_what_is_not_here() -> None:
    folder = ROOT / "docs" / "decisions"
    listed = set(re.findall(r"\((\d{3}-[\w-]+\.md)\)", (folder / "README.md").read_text()))
    assert listed == {path.name for path in folder.glob("[0-9]*.md")}
    cited = set(tracked("grep", "-hoE", r"[0-9]{3}-[a-z0-9-]+\.md", "--", ":!docs/decisions/README.md").split())
    assert cited <= listed
    for page in sorted(folder.glob("[0-9]*.md")):
        paths = {path for path in quoted(page.read_text()) if re.fullmatch(r"[\w.-]+(/[\w.-]*)+", path)}
        assert [path for path in paths if not (ROOT / path.lstrip("/")).exists()] == [], page.name
    assert tracked("grep", "-nE", "DESIGN" + r"(\.md|,? section)") == ""


ABOVE_THE_STORE = ("cli", "ui", "integrations", "training", "catalog")
SAVES_OF_THEIR_OWN = {"integrations/dcp/dcp_save.py"}
"""What is a save itself, whose phases another program calls: it works on the engine as `session/save` does."""


def nodes(path: Path, pattern: str) -> Iterator[ast.AST]:
    """Of a file in which the pattern occurs: to parse all files takes seconds."""
    text = path.read_text()
    return ast.walk(ast.parse(text)) if re.search(pattern, text) else iter(())


def is_of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


def test_what_is_built_on_a_store_reaches_into_it_through_one_interface() -> None:
    """Trainers and databases have engines, too, which they keep as `self._engine`."""
    reached = {
        f"{name}:{node.lineno}"
        for area in ABOVE_THE_STORE
        for path in sorted((PACKAGE / area).rglob("*.py"))
        if (name := path.relative_to(PACKAGE).as_posix()) not in SAVES_OF_THEIR_OWN
        for node in nodes(path, r"engine|session")
        if isinstance(node, ast.Attribute)
        and (node.attr in ("engine", "session", "_session") or (node.attr == "_engine" and not is_of_self(node)))
    }
    assert reached == set(), "use a public method of the store, or store/internals.py"


def test_an_engine_is_not_changed_after_it_was_made() -> None:
    names = {field.name for field in dataclasses.fields(Engine)}
    changed = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in python_files()
        for node in nodes(path, r"engine\.\w")
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr in names
        and ast.unparse(node.value).rpartition(".")[2] in ("engine", "_engine")
    ]
    assert changed == [], "use dataclasses.replace"


PASSED_ON: dict[str, str] = {
    "training/sample_cursor.py": "a DataLoader",
    "integrations/hf": "transformers",
    "integrations/lightning": "Lightning",
    "integrations/ray": "Ray",
}
"""Whose arguments a function may take as `**options: Any`."""


def test_options_have_names() -> None:
    untyped = [
        name
        for path in python_files()
        for node in nodes(path, r"\*\*\w*options")
        if isinstance(node, ast.FunctionDef)
        and (kwarg := node.args.kwarg) is not None
        and kwarg.arg.endswith("options")
        and "Unpack[" not in ast.unparse(kwarg)
        and not (name := path.relative_to(PACKAGE).as_posix()).startswith(tuple(PASSED_ON))
    ]
    assert untyped == [], "name them, or use Unpack of a TypedDict"


def test_no_class_says_that_a_call_may_be_tried_again() -> None:
    """`retry` of an error does: some members of `RetryableError` must not be tried again."""
    caught = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in python_files()
        for node in nodes(path, "RetryableError")
        if (isinstance(node, ast.ExceptHandler) and node.type is not None and "RetryableError" in ast.unparse(node.type))
        or (isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass") and "RetryableError" in ast.unparse(node))
    ]
    assert caught == []

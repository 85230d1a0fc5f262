"""What is installed is what is here. `make package` tries out what is built."""

import ast
import re
from pathlib import Path

import tensorstore_ck

ROOT = Path(tensorstore_ck.__file__).parent


def test_every_folder_of_the_package_is_one_that_setuptools_finds() -> None:
    """It finds packages by their `__init__.py`: modules in a folder without one would be missing from what is installed."""
    folders = {path.parent for top in (ROOT, ROOT / "gc", ROOT / "chunker") for path in top.rglob("*.py")} - {ROOT / "standalone"}
    assert len(folders) > 30
    assert [folder for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []


def test_package_docstrings_list_their_files() -> None:
    """Each file is named once, in a line of the docstring that begins with file names, and no file that is not there."""
    wrong = {}
    for package in (*ROOT.glob("**/__init__.py"), ROOT / "chunker" / "__init__.py", ROOT / "gc" / "__init__.py"):
        docstring = ast.get_docstring(ast.parse(package.read_text())) or ""
        names = re.findall(r"^(\w+\.py(?:, \w+\.py)*)", docstring, re.MULTILINE)
        listed, files = ", ".join(names), {path.name for path in package.parent.glob("*.py")} - {"__init__.py", "__main__.py"}
        files = {name for name in files if not name.startswith("cmd_")}  # which the docstring of `cli` has as one line
        if sorted(filter(None, listed.split(", "))) != sorted(files):
            wrong[package.parent.relative_to(ROOT).as_posix()] = listed
    assert wrong == {}


def test_the_citation_is_of_this_version() -> None:
    lines = (ROOT.parent / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert f"version: {tensorstore_ck.__version__}" in lines


def test_the_kernel_is_built_for_every_python_from_the_oldest_on() -> None:
    """One wheel for all of them: the limited API of the oldest Python that pyproject.toml allows."""
    setup = (ROOT.parent / "setup.py").read_text(encoding="utf-8")
    oldest = re.search(r'requires-python = ">=3\.(\d+)"', (ROOT.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert oldest is not None
    assert f'"Py_LIMITED_API", "0x03{int(oldest[1]):02x}0000"' in setup
    assert f'"py_limited_api": "cp3{oldest[1]}"' in setup

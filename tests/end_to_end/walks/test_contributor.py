"""A contributor: clones, `make dev`, tests a file, sees it fail once, lints it, and adds an importer of a format of their own."""

import re
import site
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

from tests.documents import REPOSITORY, text
from tests.end_to_end.walks.walk import Walk

pytestmark = pytest.mark.slow

PYTHON: Final = """#!/bin/bash
# A new environment with the packages at hand below it: pip has nothing to download.
set -e
[ "$1 $2" = "-m venv" ]
'{python}' -m venv --without-pip "$3"
echo 'import site; site.addsitedir("{packages}")' > "$(echo "$3"/lib/python*/site-packages)/base.pth"
for program in lint-imports mypy pytest ruff; do ln -s "{programs}/$program" "$3/bin"; done
"""
IMPORTER: Final = '''"""Weights as an old simulator writes them: a line for each, with its name and its numbers."""

import torch

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.integrations.importing import ForeignCheckpoint

FIRST = b"# simulator weights, step "


def read_simulator(path: str) -> ForeignCheckpoint | None:
    """The weights; None for anything else."""
    with open(path, "rb") as file:
        if file.read(len(FIRST)) != FIRST:
            return None
        step, *lines = file.read().decode().splitlines()
    state = {}
    try:
        for name, *numbers in map(str.split, lines):
            state[name] = torch.tensor([float(number) for number in numbers])
    except ValueError as exc:
        raise CorruptObjectError(f"{path} has a line that is not a name and numbers: {exc}", object_id=path) from exc
    return ForeignCheckpoint(state, step=int(step), metadata={"imported from": "simulator"})
'''
MOST_LINES: Final = 40
WEIGHTS: Final = "# simulator weights, step 400\nencoder 1 2 3\ndecoder 4.5\n"
FAULT: Final = "sed -i 's/[.]lock/.locked/' tensorstore_ck/log/field_checks.py"
FAILED, CORRUPT = 1, 41


def python_at_hand(path: Path) -> Path:
    """See `PYTHON`."""
    (wanted,) = re.findall(r"^torch==(\S+)$", text(REPOSITORY / "constraints.txt"), re.MULTILINE)
    if torch.__version__ != f"{wanted}+cpu":
        pytest.skip(f"make dev would download torch: this is {torch.__version__}, not {wanted}+cpu")
    path.write_text(PYTHON.format(python=sys.executable, packages=site.getsitepackages()[0], programs=Path(sys.executable).parent))
    path.chmod(0o755)
    return path


def printed(line: str) -> str:
    """A line of CONTRIBUTING.md, as it is there."""
    found = re.findall(rf"^ +({re.escape(line)})(?:  +#.*)?$", text(REPOSITORY / "CONTRIBUTING.md"), re.MULTILINE)
    assert found == [line], f"CONTRIBUTING.md does not print {line}"
    return line


def test_a_first_change_and_an_importer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = Walk(tmp_path, monkeypatch)
    monkeypatch.delenv("PYTHONPATH")  # the clone's package, not this one
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHON", str(python_at_hand(tmp_path / "python")))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # a newcomer's shell is not one of `make test-slow`
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")  # pip takes 0 for "no isolation"
    with walk:
        walk.type(f"git clone -q {REPOSITORY} tensorstore_ck")
        walk.type("cd tensorstore_ck")
        made = walk.type(printed("make dev"))
        assert re.search(r"^downloads \d+ MB into \.venv-dev, .* on the disk", made.text)
        (all_tests,) = re.findall(r"^now: (.*)$", made.text, re.MULTILINE)

        # the printed line, for one file; a test fails where the feature is broken; the page's lines for a lint
        one_file = printed(".venv-dev/bin/python -m pytest tests/log/test_names.py")
        assert one_file.split()[:3] == all_tests.split()[:3]
        assert re.search(r"^=+ \d+ passed in", walk.type(one_file).text, re.MULTILINE)
        walk.type(FAULT)
        broken = walk.type(one_file, code=FAILED)
        assert "FAILED tests/log/test_names.py::test_bad_names_and_why[a/b.lock-'.lock']" in broken.text
        assert walk.type("git diff --stat").lines[-1].startswith(" 1 file changed")
        walk.type("git checkout -q .")
        assert "All checks passed" in walk.type(printed(".venv-dev/bin/ruff check tensorstore_ck/log/field_checks.py")).text

        # an importer, from the template
        walk.type("cp -r examples/npz_importer ../simulator")
        walk.type("cd ../simulator")
        walk.type("mv npz_importer.py simulator_importer.py")
        walk.type("sed -i 's/npz/simulator/g' pyproject.toml")
        assert IMPORTER.count("\n") <= MOST_LINES
        (tmp_path / "simulator" / "simulator_importer.py").write_text(IMPORTER)
        (tmp_path / "old.weights").write_text(WEIGHTS)
        (tmp_path / "bad.weights").write_text(WEIGHTS.replace("4.5", "four"))
        walk.type("cd ../tensorstore_ck")
        walk.type(".venv-dev/bin/python -m pip install -q ../simulator")
        walk.type(". .venv-dev/bin/activate")
        walk.type("tsck init ../ckpt")
        assert "simulator" in walk.type("tsck import ../old.weights --ref runs/old -s ../ckpt").text
        assert "400" in walk.type("tsck log runs/old -s ../ckpt").text
        shown = walk.type("tsck show runs/old -s ../ckpt").text
        assert "imported from" in shown
        assert (
            "could not convert string to float: 'four'"
            in walk.type("tsck import ../bad.weights --ref runs/bad -s ../ckpt", code=CORRUPT).text
        )

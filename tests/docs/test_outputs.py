"""What README.md and the quickstart show as the output of a step is what it prints, but for roots, times and measured numbers."""

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests import documents
from tests.documents import DOCS, README, REPOSITORY

pytestmark = pytest.mark.slow
STEPS = re.compile(r"^```(python|sh)\n((?:(?!```).*\n)+)```\n+(?:.*:\n+)?```text\n((?:(?!```).*\n)+)```$", re.MULTILINE)
"""A block, and what is shown below as its output."""
MEASURED = (
    (r"\b[0-9a-f]{12,64}\b", "ROOT"),
    (r"\d{4}-\d\d-\d\dT[\d:]+Z", "TIME"),
    (r"\b\d+(\.\d+)? ([KM]i)?B\b", "BYTES"),
    (r"\b\d+\.\d+\b", "NUMBER"),
    (r" +", " "),
)


def masked(text: str) -> str:
    for pattern, replacement in MEASURED:
        text = re.sub(pattern, replacement, text)
    return text


def draw_log() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_log", DOCS / "pictures" / "draw_log.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("page", "steps"), [(README, 2), (DOCS / "quickstart.md", 4)], ids=["README.md", "quickstart.md"])
def test_a_step_prints_what_the_page_shows(page: Path, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line ``...`` stands for any lines."""
    for name, value in {"PYTHONPATH": str(REPOSITORY), "TSCK_CACHE_DIR": str(tmp_path / "cache"), "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    _, program = next(iter(documents.python_blocks(page)))

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=tmp_path, check=True, text=True, stdout=subprocess.PIPE).stdout

    printed = {program: run(sys.executable, "-c", program)}
    shown = STEPS.findall(documents.text(page))
    assert len(shown) == steps
    for kind, block, output in shown:
        if kind == "sh":
            printed[block] = run(sys.executable, "-m", "tensorstore_ck", *shlex.split(block)[1:])
        pattern = re.escape(masked(output)).replace(re.escape("...\n"), "(?s:.*)")
        assert re.fullmatch(pattern, masked(printed[block])), (block, masked(output), masked(printed[block]))


def test_the_picture_of_a_log_is_what_it_prints(tmp_path: Path) -> None:
    module = draw_log()
    drawn = module.terminal(module.COMMAND, module.printed(tmp_path))
    picture = (DOCS / "pictures" / "tsck-log.svg").read_text(encoding="utf-8")
    assert masked(re.sub(r'(width|height|viewBox|textLength)="[\d. ]+"', "", picture)) == masked(
        re.sub(r'(width|height|viewBox|textLength)="[\d. ]+"', "", drawn)
    )

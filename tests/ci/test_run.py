"""A test that fails beside others and passes alone is named, and does not fail the run; where it may be a race, it does."""

import subprocess
import sys
from pathlib import Path

import pytest

FLAKY = """
import os, pytest
def test_fails_once():
    if not os.path.exists({once!r}):
        open({once!r}, "w").close()
        raise ValueError("not yet")
def test_passes(): pass
"""


@pytest.mark.parametrize(
    ("more", "code", "said"),
    [
        ("", 0, "FLAKY test_it.py::test_fails_once: failed beside others, passed alone"),
        ("@pytest.mark.race\ndef test_race(): raise ValueError", 1, "2 failed, 1 passed"),
        ("def test_fails(): raise ValueError", 1, "2 failed; they run again, one at a time"),
        ("import nothing_of_this_name", 2, "1 error"),
    ],
    ids=["flaky", "race", "fault", "cannot be collected"],
)
def test_what_failed_runs_again_alone(tmp_path: Path, more: str, code: int, said: str) -> None:
    (tmp_path / "test_it.py").write_text(FLAKY.format(once=str(tmp_path / "once")) + more)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = race: one\n")
    command = [sys.executable, "-m", "tests.run", "--flaky", str(tmp_path / "flaky.txt"), "-n", "0", str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert (tmp_path / "flaky.txt").exists() == (code == 0)
    if code == 0:
        assert "ValueError: not yet" in (tmp_path / "flaky.txt").read_text()

"""A failure that passes alone is named and does not fail the run, unless the test is marked as a possible race."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FLAKY = """
import pathlib, pytest
def fail_once(name):
    once = pathlib.Path({folder!r}, name)
    if not once.exists():
        once.touch()
        raise ValueError("not yet")
def test_fails_once(): fail_once("one")
def test_passes(): pass
"""
AGAIN = "they run again, one at a time"
PLUGINS = ("-p", "xdist", "-p", "pytest_reportlog.plugin")
"""Those of the arguments alone: the others take twice as long to load as all else takes."""


@pytest.mark.parametrize(
    ("more", "code", "said", "is_repeated"),
    [
        ("", 0, "FLAKY test_it.py::test_fails_once: failed beside others, passed alone", True),
        ("@pytest.mark.race\ndef test_race(): fail_once('race')", 1, "2 failed, 1 passed", False),
        ("def test_fails(): raise ValueError", 1, "1 failed", True),
        ("import nothing_of_this_name", 2, "1 error", False),
    ],
    ids=["flaky", "race", "fault", "cannot be collected"],
)
def test_what_failed_runs_again_alone(tmp_path: Path, more: str, code: int, said: str, is_repeated: bool) -> None:
    (tmp_path / "test_it.py").write_text(FLAKY.format(folder=str(tmp_path)) + more)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = race: one\n")
    command = [sys.executable, "-m", "tests.run", "--flaky", str(tmp_path / "flaky.txt"), *PLUGINS, "-n", "0", str(tmp_path)]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        command, env=environment, cwd=Path(__file__).parents[2], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == code, done.stdout
    assert said in done.stdout
    assert (AGAIN in done.stdout) == is_repeated
    assert (tmp_path / "flaky.txt").exists() == (code == 0)
    if code == 0:
        assert "ValueError: not yet" in (tmp_path / "flaky.txt").read_text()

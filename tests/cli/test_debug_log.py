"""TSCK_DEBUG: what a command decided, and why, is in a file; without it there is none."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import tensorstore_ck as tsck_package
from tensorstore_ck.cli.app import debug_log
from tests.cli.conftest import Tsck


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TSCK_DEBUG", str(tmp_path / "logs" / "debug.log"))
    return tmp_path / "logs" / "debug.log"


def test_gc_says_what_it_found_and_deletes(history: Tsck, file: Path, tmp_path: Path) -> None:
    with tsck_package.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        root = store.resolve("runs/gpt@1").root
    level = logging.getLogger("tensorstore_ck").level
    assert history("forget", "runs/gpt@1").code == 0
    done = history("gc", "--undo-window", "0s", "--min-age", "0s", "--max-delete", "1")
    assert logging.getLogger("tensorstore_ck").level == level
    text = file.read_text()
    assert done.err.endswith(f"is in {file}\n")
    assert "tensorstore_ck.log: entry 3 (expire): created" in text or "(forget): created" in text, text
    assert "1 snapshots expired" in text
    assert "tensorstore_ck.gc: delete parts/" in text
    assert file.stat().st_mode & 0o777 == 0o600
    assert root not in done.out


def test_an_error_has_its_traceback_there(history: Tsck, file: Path) -> None:
    assert history("show", "nope").code == 25
    assert "Traceback" in file.read_text()
    assert history("get", "runs/gpt", "out.safetensors").code == 0
    assert " is step 2 of runs/gpt, root " in file.read_text(), "later lines are appended"


def test_secrets_are_left_out(file: Path) -> None:
    """Of the arguments of a process, and of what others log through the package's loggers."""
    options = ["--storage-option", "secret=hidden-option", "-s", "s3://key:hidden-password@bucket/x?token=hidden-token"]
    subprocess.run([sys.executable, "-m", "tensorstore_ck", "log", *options], capture_output=True, check=False)
    assert file.read_text()
    with debug_log():
        logging.getLogger("tensorstore_ck.backend").debug("asked %s", "https://host/x?X-Amz-Signature=hidden-signature")
    text = file.read_text()
    assert "asked https://host/x" in text
    assert "hidden-" not in text


def test_the_file_is_not_reached_through_a_link(history: Tsck, file: Path, tmp_path: Path) -> None:
    file.parent.mkdir()
    file.symlink_to(tmp_path / "elsewhere")
    assert history("log").code == 22
    assert not (tmp_path / "elsewhere").exists()


def test_without_it_nothing_is_written_and_the_level_stays(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSCK_DEBUG", "0")
    level = logging.getLogger("tensorstore_ck").level
    before = set(tmp_path.rglob("*.log"))
    assert history("log").code == 0
    assert set(tmp_path.rglob("*.log")) == before
    assert logging.getLogger("tensorstore_ck").level == level


def test_a_file_that_cannot_be_written_is_an_error(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSCK_DEBUG", str(tmp_path / "model.safetensors" / "x"))
    done = history("log")
    assert done.code == 22
    assert "TSCK_DEBUG" in done.err

"""`tsck doctor`: what a report needs, without secrets."""

import os
import platform
import time
from pathlib import Path

import pytest

import tensorstore_ck
from tests.cli.conftest import Tsck, run_tsck

FACTS = ["tsck", "packages", "extras", "not installed", "host", "cache", "seen logs", "variables", "store", "disk", "clock"]


def test_ten_lines_say_what_a_report_needs(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSCK_TOKEN", "hunter2")
    report = history("doctor")
    names = [name for name in FACTS if any(line.startswith(f"{name} ") for line in report.out.splitlines())]
    assert set(FACTS) - set(names) <= {"not installed"}, "there may be nothing"
    assert len(report.out.splitlines()) == len(names)
    found = history("doctor", "--json").json
    assert f"{tensorstore_ck.__version__}, Python {platform.python_version()}" in found["tsck"]
    assert "torch 2" in found["packages"]
    assert str(tmp_path) in found["cache"]
    assert "1 branch" in found["store"]
    assert "TSCK_TOKEN" in found["variables"]
    assert "hunter2" not in str(found)


def test_without_a_store_it_says_how_to_name_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run_tsck(tmp_path, "doctor", "--json", store=None)
    assert found.code == 0
    assert found.json["store"] == "none given: -s URL looks at one"


def test_a_store_that_cannot_be_opened_is_a_line_and_an_exit_code(tsck: Tsck) -> None:
    found = tsck("doctor", "--json", "-s", "s3://bucket/ckpt?token=hunter2")
    assert (found.code, found.json["store"].split(": ")[1]) == (23, "invalid_url")
    assert "hunter2" not in found.out
    assert tsck("doctor", "-s", "nothing-here").code == 30


def test_a_clock_that_is_behind_the_log_is_said(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ago" in history("doctor", "--json").json["clock"]
    now_ns = time.time_ns()
    monkeypatch.setattr("tensorstore_ck.cli.cmd_doctor.time.time_ns", lambda: now_ns - 10**12)
    assert "in the future; a clock is wrong" in history("doctor", "--json").json["clock"]


def test_a_cache_that_cannot_be_written_is_said(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cache, NOT writable (" in history("doctor", "--json").json["cache"]
    assert "not there yet, NOT writable (" in history("doctor", "--cache-dir", str(tmp_path / "a" / "b"), "--json").json["cache"]

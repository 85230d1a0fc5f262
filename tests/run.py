"""Runs pytest, then what failed again, alone: `python -m tests.run [--log FILE] [--flaky FILE] ARGUMENTS ...`.

A test that passes when nothing else runs does not fail the run. It is named at the end, with its first traceback, as FLAKY: a fault of
the test or a race of the product, to be repaired before the work at hand is done. Tests marked `race` are not tried again.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest


def failures(log: Path) -> list[dict[str, Any]]:
    """The reports of what failed, from a file that `--report-log` wrote."""
    reports = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [report for report in reports if report["$report_type"] == "TestReport" and report["outcome"] == "failed"]


def is_retried(report: dict[str, Any]) -> bool:
    """Not where the fault would be a race, nor where a worker died, whose report has no keywords."""
    return bool(report["keywords"]) and "race" not in report["keywords"]


def traceback_of(report: dict[str, Any]) -> str:
    """As pytest prints it, without the lines of source around it."""
    text = report["longrepr"]
    if isinstance(text, dict):
        crash = text.get("reprcrash") or {}
        entries = (text.get("reprtraceback") or {}).get("reprentries", [])
        places = [entry["data"].get("reprfileloc") for entry in entries]
        lines = [f"  {place['path']}:{place['lineno']}: {place['message']}" for place in places if place]
        return "\n".join([*lines, str(crash.get("message"))])
    return str(text)


def run(arguments: Sequence[str], log: Path, flaky: Path | None) -> int:
    """pytest's exit code; 0 if everything that failed passed alone."""
    log.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest"]
    code = subprocess.run([*command, *arguments, "--cache-clear", f"--report-log={log}"], check=False).returncode
    failed = failures(log)
    if code != pytest.ExitCode.TESTS_FAILED or not failed or not all(map(is_retried, failed)):
        return code
    names = sorted({report["nodeid"] for report in failed})
    print(f"\n{len(names)} failed; they run again, one at a time", flush=True)
    code = subprocess.run(
        [*command, *arguments, "-n", "0", "--last-failed", "--last-failed-no-failures", "none", "--exitfirst"], check=False
    ).returncode
    if code == 0:
        text = "\n".join(f"FLAKY {report['nodeid']}: failed beside others, passed alone\n{traceback_of(report)}" for report in failed)
        print(f"\n{text}", flush=True)
        if flaky is not None:
            with flaky.open("a") as file:
                file.write(f"{text}\n")
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--log", type=Path, help="where the reports of the first run stay")
    parser.add_argument("--flaky", type=Path, help="where the names of flaky tests are added")
    given, arguments = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        return run(arguments, given.log or Path(folder) / "log.jsonl", given.flaky)


if __name__ == "__main__":
    sys.exit(main())

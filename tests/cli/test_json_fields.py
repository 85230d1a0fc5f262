"""docs/reference/json.md names the fields that commands print with --json, and no others."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Tsck
from tests.cli.everycommand import RUNS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "json.md"
BY_NAME = {"branch", "tag", "policy", "quota"}
"""Without arguments, they print an object by names."""
LISTS = {"log", "forget", "undo"}
NESTED = {"gc": "report", "fsck": "report"}
UNPRINTED = {"forecast"}
"""Needs an option that takes long."""


def _documented() -> dict[str, set[str]]:
    """Command, with its action -> the names in its row."""
    found: dict[str, set[str]] = {}
    for commands, fields in re.findall(r"^\| (`.*?) \| (.*?) \|$", PAGE.read_text(encoding="utf-8"), re.M):
        names = _snapshot_fields() if "*snapshot" in fields and "`" not in fields else _names(fields)
        found |= dict.fromkeys(re.findall(r"`([^`]+)`", commands), names)
    return found


def _names(fields: str) -> set[str]:
    return {name for name in re.findall(r"`([^`]+)`", fields) if re.fullmatch("[a-z_ ]+", name)}


def _snapshot_fields() -> set[str]:
    section = PAGE.read_text(encoding="utf-8").partition("## snapshot")[2].partition("## Documents")[0]
    return {name for cell in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`([a-z_]+)`", cell)}


def _row(words: list[str], rows: dict[str, set[str]]) -> str:
    """The row of a run: the longest name that fits."""
    name = words[0]
    if name in BY_NAME:
        with_arguments = {"branch": "branch NAME AT", "tag": "tag NAME AT"}.get(name, f"{name} set")
        return name if len(words) == 1 else with_arguments
    return f"{name} {words[1]}" if f"{name} {words[1:2]}" != f"{name} []" and f"{name} {words[1]}" in rows else name


def test_every_field_is_documented_and_printed(history: Tsck) -> None:
    rows = _documented()
    printed: dict[str, set[str]] = {}
    for words in [run for runs in RUNS.values() for run in runs if "--help" not in run and run[0] != "completion"]:
        found: Any = history(*words, "--json")
        if '"error"' in found.out or not found.out:
            continue  # what is missing for this run is the test's own matter
        document, row = found.json, _row(words, rows)
        assert row in rows, words
        if row in BY_NAME:
            continue
        keys = set(document[0] if row in LISTS and document else {} if row in LISTS else document)
        keys |= set(document[NESTED[row]]) if row in NESTED else set()
        extra = keys - rows[row]
        assert extra == set(), f"{' '.join(words)} prints {extra}, which docs/reference/json.md lacks"
        printed.setdefault(row, set()).update(keys)
    snapshot = _snapshot_fields()
    assert printed["put"] == snapshot
    assert len(printed) > 25
    for row, fields in printed.items():
        if rows[row] == snapshot and not row.startswith("forget"):
            assert fields == snapshot, row
    assert printed["usage"] <= rows["usage"]
    assert printed["doctor"] | UNPRINTED | {"not installed"} >= rows["doctor"]


@pytest.mark.parametrize("row", ["usage", "diff", "recode", "advise", "salvage", "adopt"])
def test_no_field_is_documented_that_is_not_printed(history: Tsck, row: str) -> None:
    """For rows that name the fields of their document alone."""
    document = history(*RUNS[row][-1], "--json").json
    meanings = {"now_bytes", "command", "later", "forget", "locations", *document["space"]} if row == "usage" else set()
    assert _documented()[row] - meanings == set(document)

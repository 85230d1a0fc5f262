"""Units, times, tables and JSON."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import click
import pytest
from click.testing import CliRunner

from tensorstore_ck.cli import output
from tensorstore_ck.cli.output import counted, emit, facts, metrics_text, printable, snapshot_table, table
from tensorstore_ck.common.units import human_bytes, iso_time, parse_rate
from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.log.snapshot import Snapshot


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (1024**2 - 1, "1.0 MiB"),
        (3 * 1024**4, "3.0 TiB"),
        (2**80, "1048576.0 EiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(("text", "rate"), [("100MB", 1e8), ("1.5 GiB/s", 1.5 * 2**30), (0.5, 0.5), (7, 7)])
def test_rates(text: Any, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("wrong", ["", "fast", "-1MB", "0", "inf", 0, -1.0, float("inf"), float("nan")])
def test_what_is_no_rate(wrong: Any) -> None:
    with pytest.raises(InvalidOptionError, match="rate limit"):
        parse_rate(wrong)


def test_commands_print_by_these_functions_alone() -> None:
    printing = re.compile(r"\bprint\(|\becho\(|sys\.std(?:out|err)\.write")
    folder = Path(output.__file__).parent
    assert [path.name for path in folder.glob("*.py") if printing.search(path.read_text())] == ["output.py"]


def test_times_are_utc_whatever_the_clock_said() -> None:
    assert iso_time(1_700_000_000_123_456_789) == "2023-11-14T22:13:20Z"
    assert iso_time(2**63 - 1).startswith("2262-")
    assert iso_time(2**80).endswith(" ns")


def test_plurals() -> None:
    assert (counted(1, "entry"), counted(2, "log entry")) == ("1 entry", "2 log entries")
    assert (counted(1000, "pack"), counted(0, "block")) == ("1,000 packs", "0 blocks")


def test_printable_keeps_letters_of_all_languages() -> None:
    assert printable("größe 大\t\x07\u202e") == "größe 大\\t\\x07\\u202e"


def test_tables_align_and_leave_empty_columns_out() -> None:
    lines = [click.unstyle(line) for line in table(["A", "SIZE", "NOTE"], [["x", "1", ""], ["long", "100", ""]], right={"SIZE"})]
    assert lines == ["A     SIZE", "x        1", "long   100"]


def test_facts_leave_out_what_is_not_known() -> None:
    assert [click.unstyle(line) for line in facts([("a", "1"), ("long", ""), ("bb", "2")])] == ["a   1", "bb  2"]


class _Pair(NamedTuple):
    first: object
    second: object


@pytest.mark.parametrize(
    ("value", "document"),
    [
        (_Pair(1, b"\x01"), {"first": 1, "second": "01"}),
        ({"a": float("nan"), 2: float("-inf")}, {"a": "nan", "2": "-inf"}),
        (({1}, (2,), None, True), [[1], [2], None, True]),
        (object, "<class 'object'>"),
    ],
)
def test_json_holds_anything(value: object, document: Any) -> None:
    @click.command()
    def show() -> None:
        emit(value, ["text"], as_json=True)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    assert json.loads(CliRunner().invoke(show).stdout, parse_constant=refuse) == document


@pytest.mark.parametrize("document", [{}, {"a": 1}, {"a\n": {"b": [1, {"c\n  ": None}]}, "é": []}, [], [{"a": [1]}], "text\n"])
def test_a_document_is_printed_item_by_item_as_at_once(document: object, capsys: pytest.CaptureFixture[str]) -> None:
    emit(document, [], as_json=True)
    assert capsys.readouterr().out == json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def test_thousands_of_names_of_one_snapshot_make_short_rows() -> None:
    metrics = {f"{'m' * 240}{number}": 1.0 for number in range(1000)}
    snapshot = Snapshot(
        root="0" * 64,
        id="A",
        ref="r",
        step=1,
        time_ns=0,
        parent=None,
        metrics=metrics,
        mark="",
        reason="",
        logical_bytes=0,
        new_bytes=0,
        entry=1,
    )
    rows = snapshot_table([snapshot] * 3000, [f"b{number}" for number in range(3000)], "BRANCH")
    assert max(map(len, rows)) < 2500
    assert "+99" in rows[1]


@pytest.mark.parametrize(("columns", "shown"), [(15, "loss=0.00333333"), (14, "loss=0.00333"), (11, "loss=0.0033"), (10, "+1")])
def test_metrics_are_rounded_before_they_are_left_out(columns: int, shown: str) -> None:
    assert metrics_text({"loss": 1 / 300}, columns) == shown

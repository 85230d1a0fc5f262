"""Bars: on a terminal alone, and made of text alone."""

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensorstore_ck import open as open_store
from tensorstore_ck.cli import main
from tensorstore_ck.cli.progress import Bar
from tests.cli.conftest import Tsck


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    terminal = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_bytes_and_phases(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = on_terminal(monkeypatch)
    with Bar("putting") as bar:
        bar.add(5)
        assert terminal.getvalue() == "", "nothing to show while the total is not known"
        bar.expect(10)
        bar.add(0)
        bar.say("a line")
        bar(3, 10)
        bar.phase("marking", 1, 4)
    shown = terminal.getvalue()
    assert "putting" in shown
    assert "marking" in shown
    assert "100%" in shown
    assert capsys.readouterr().out == "a line\n"
    bar.add(1)
    assert terminal.getvalue() == shown


def test_a_failure_does_not_complete_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    bar = Bar("putting")
    bar(1, 4)
    bar.__exit__(ValueError)
    assert "100%" not in terminal.getvalue()
    assert "25%" in terminal.getvalue()


def test_names_are_neither_markup_nor_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    with Bar() as bar:
        bar.phase("[bold]pack[/bold]\x1b[2J", 1, 2)
    assert "[bold]pack[/bold]\\x1b[2J" in terminal.getvalue()


def lines_of(terminal: Terminal) -> list[str]:
    return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", terminal.getvalue())]


@pytest.mark.parametrize("columns", [25, 40, 80])
def test_a_long_label_leaves_the_percentage_and_the_bytes_their_place(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = Bar("a-long-label" * 10, lambda: 0.0)
    bar(1 << 20, 1 << 22)
    bar.__exit__(ValueError)
    lines = lines_of(terminal)
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("a-long-label"[: columns // 2 - 1]) and "… " in line and " 25% " in line for line in lines)
    assert any("1.0 MiB of 4.0 MiB" in line for line in lines) == (columns == 80)


def test_bytes_have_a_rate_and_steps_have_none(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "80")
    seconds = iter([10.0, 20.0, 22.0, 30.0, 30.0])
    with Bar("getting", lambda: next(seconds)) as bar:
        bar.expect(1 << 22)
        bar.add(1 << 20)
        bar.phase("marking", 1, 4)
    lines = lines_of(terminal)
    assert any("getting" in line and " 25% 1.0 MiB of 4.0 MiB, 512.0 KiB/s " in line for line in lines)
    assert not [line for line in lines if "marking" in line and " of " in line]


@pytest.mark.parametrize("args", [("get", "c", "out.pt"), ("export", "c", "--to", "torch", "out.pt")], ids=["get", "export"])
def test_what_is_read_counts_with_its_size_in_memory(tsck: Tsck, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    with open_store("ck", create=True, codec="small") as store:
        snapshot = store.put_snapshot({"a": torch.arange(1 << 16)}, ref="c")
    assert snapshot.new_bytes < snapshot.logical_bytes / 2
    counts: list[int] = []
    monkeypatch.setattr(Bar, "add", lambda _, count: counts.append(count))
    assert tsck(*args).code == 0
    assert snapshot.logical_bytes <= sum(counts) < 1.1 * snapshot.logical_bytes


@pytest.mark.parametrize("args", [("put", "new.safetensors", "--ref", "new"), ("get", "runs/gpt", "out.pt")], ids=["put", "get"])
def test_put_and_get_have_a_bar(history: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]) -> None:
    save_file({"a": torch.randn(1000)}, tmp_path / "new.safetensors")
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("TSCK_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(SystemExit) as ended:
        main([*args, "-s", "ck", "--json"])
    assert ended.value.code == 0
    assert "100%" in terminal.getvalue()


def test_nothing_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Bar("putting") as bar:
        bar(1, 4)
        bar.phase("marking", 1, 4)
    assert isinstance(sys.stderr, io.StringIO)
    assert sys.stderr.getvalue() == ""

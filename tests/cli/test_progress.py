"""Bars: on a terminal alone, and made of text alone."""

import io
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

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


@pytest.mark.parametrize("columns", [25, 40, 80])
def test_a_long_label_leaves_the_percentage_its_place(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    terminal = on_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", str(columns))
    bar = Bar("a-long-label" * 10)
    bar(1, 4)
    bar.__exit__(ValueError)
    lines = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]", terminal.getvalue())]
    assert max(map(len, lines)) <= columns
    assert any(line.startswith("a-long-label"[: columns // 2 - 1]) and "… " in line and " 25% " in line for line in lines)


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

"""Long results go through a pager on a terminal, and nowhere else."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import tensorstore_ck
from tests.cli.conftest import Tsck

ROOT = str(Path(tensorstore_ck.__file__).parents[1])
PAGER = "sed 's/^/paged: /'"


def on_terminal(folder: Path, *args: str, code: str = "", **variables: str) -> tuple[int, str]:
    """Exit code and output of `tsck` on a terminal."""
    env = {name: value for name, value in os.environ.items() if name not in ("PAGER", "TSCK_PAGER", "LESS")}
    env |= {"PYTHONPATH": ROOT, "TSCK_CACHE_DIR": str(folder / "cache"), "TSCK_STORE": str(folder / "ck"), "TERM": "xterm", **variables}
    terminal, child = pty.openpty()
    command = [sys.executable, "-c", f"{code}\nfrom tensorstore_ck.cli import main\nmain()", *args]
    with subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env, cwd=folder) as process:
        os.close(child)
        shown = b""
        try:
            while piece := os.read(terminal, 65536):
                shown += piece
        except OSError:  # the other end is closed
            pass
        os.close(terminal)
        return process.wait(120), shown.decode().replace("\r\n", "\n")


@pytest.fixture
def folder(history: Tsck, tmp_path: Path) -> Path:
    return tmp_path


def test_a_pager_shows_results_in_colour_and_less_has_gits_options(folder: Path) -> None:
    code, shown = on_terminal(folder, "log", "runs/gpt", PAGER="false", TSCK_PAGER=f"echo $LESS; {PAGER}")
    assert code == 0
    assert shown.startswith("FRX\npaged: \x1b[1mROOT")
    assert shown.count("\npaged: ") == 3


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
def test_a_pager_gets_no_colours_where_the_user_wants_none(folder: Path, variables: dict[str, str]) -> None:
    assert on_terminal(folder, "log", "runs/gpt", PAGER=PAGER, **variables)[1].startswith("paged: ROOT")


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--no-pager", "-s", "ck", "log"], {"PAGER": PAGER}),
        (["log", "--no-pager"], {"PAGER": PAGER}),
        (["log", "--json"], {"PAGER": PAGER}),
        (["branch"], {"PAGER": PAGER}),
        (["log"], {"PAGER": PAGER, "TSCK_PAGER": ""}),
        (["log"], {"PAGER": "cat"}),
        (["log"], {"PAGER": "there-is-no-such-pager -x"}),
    ],
    ids=["before", "after", "json", "short", "empty", "cat", "missing"],
)
@pytest.mark.slow
def test_no_pager(folder: Path, arguments: list[str], variables: dict[str, str]) -> None:
    code, shown = on_terminal(folder, *arguments, **variables)
    assert code == 0
    assert "runs/gpt" in shown
    assert "paged" not in shown


def test_no_pager_without_a_terminal(history: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TSCK_PAGER", PAGER)
    for command in (["log"], ["show", "runs/gpt"], ["diff", "runs/gpt~1", "runs/gpt"], ["--no-pager", "log"]):
        done = history(*command)
        assert done.code == 0
        assert "paged" not in done.out


def test_a_pager_that_is_left_early_is_no_error(folder: Path) -> None:
    code = "from tensorstore_ck.cli import cmd_log_show_diff as m\n"
    code += "m.snapshot_table = lambda *_, **__: (str(n) for n in range(1_000_000))"
    assert on_terminal(folder, "log", "runs/gpt", code=code, TSCK_PAGER="head -n 2") == (0, "0\n1\n")


def test_ctrl_c_is_for_the_pager(folder: Path) -> None:
    """The pager sends it to `tsck`, and then goes on."""
    ended, shown = on_terminal(folder, "log", "runs/gpt", TSCK_PAGER="kill -INT $PPID; tail -n 1; echo end with $LESS", LESS="-S")
    assert ended == 0
    assert shown.endswith("\nend with -S\n"), "options of the user's own stay"
    assert "Traceback" not in shown

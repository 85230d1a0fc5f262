"""Earlier spellings of commands and options: they work, and one line on stderr has the new one."""

import click
import pytest

from tensorstore_ck.cli import main
from tensorstore_ck.cli.app import RENAMED_OPTIONS
from tests.cli.conftest import Tsck
from tests.cli.everycommand import commands


def test_options(history: Tsck) -> None:
    done = history("get", "runs/gpt", "out.safetensors", "--select", "model.*", "--allow-bad")
    lines = ["tsck: --allow-bad is deprecated: use --allow-marked", "tsck: --select is deprecated: use --include"]
    assert (done.code, sorted(done.err.splitlines())) == (0, lines)
    assert history("get", "runs/gpt", "none.safetensors", "--select=nothing.*").code == 27
    assert "--skip is deprecated" in history("export", "runs/gpt", "--to", "torch", "out.pt", "--skip", "steps").err
    assert "--leave-out is" in history("import", "out.pt", "--ref", "a", "--leave-out", "model.b", "--dry-run").err
    assert history("tier", "--take-places").err == "tsck: --take-places is deprecated: use --claim-locations\n"
    assert history("advise", "runs/gpt", "--stall", "1s", "--daily", "1GB").code == 0


def test_new_spellings_print_nothing(history: Tsck) -> None:
    done = history("checkout", "runs/gpt", "out.safetensors", "--include", "model.*", "--allow-marked")
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("old", ["--dry-run", "--by-policy"])
def test_forget_by_policy(history: Tsck, old: str) -> None:
    history("policy", "set", "runs/*", "keep_last=1")
    done = history("forget", old, "--json")
    assert done.err == f"tsck: {old} is deprecated: use `tsck policy apply`\n"
    assert done.json["branches"][0]["ref"] == "runs/gpt"


def test_help_shows_the_new_spellings_alone() -> None:
    for command in commands().values():
        text = command.get_help(click.Context(command, parent=click.Context(main), info_name=command.name))
        assert not [option for option in (*RENAMED_OPTIONS, "by-policy") if f"--{option} " in text], command.name

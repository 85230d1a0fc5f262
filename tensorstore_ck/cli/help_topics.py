"""`tsck help TOPIC` for topics other than commands: a group of commands, the exit codes, a kind of error."""

import re
from pathlib import Path
from typing import Final

import click

import tensorstore_ck
from tensorstore_ck.cli import exit_codes
from tensorstore_ck.cli.command_groups import GROUPS, write_group
from tensorstore_ck.errors import BY_KIND

EXIT_CODES: Final = "exit-codes"
TROUBLESHOOTING: Final = Path(tensorstore_ck.__file__).parent / "troubleshooting.md"


def topic_page(program: click.Group, topic: str) -> str | None:
    """The page of a topic; None if there is no such topic."""
    if topic in GROUPS:
        formatter = click.HelpFormatter(max_width=100)
        write_group(program, topic, formatter)
        return formatter.getvalue().rstrip()
    if topic == EXIT_CODES:
        return "\n".join(["Exit codes, and kinds of errors with --json (`tsck help KIND` describes one):", *exit_codes.help_lines()])
    return _entry(topic) if topic in BY_KIND else None


def _entry(kind: str) -> str:
    """The entry of an error in the page of troubleshooting, as text without links."""
    _, _, entry = TROUBLESHOOTING.read_text("utf-8").partition(f"\n## {kind}\n")
    entry = re.sub(r"\[([^]]+)]\([^)]+\)", r"\1", entry.partition("\n## ")[0]).replace("**", "").strip()
    return "\n\n".join(
        [kind, *(click.wrap_text(part, 100) if not part.startswith(("-", "```", "|")) else part for part in entry.split("\n\n"))]
    )

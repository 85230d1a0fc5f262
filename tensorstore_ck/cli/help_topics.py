"""The exit codes, one for each kind of error; and `tsck help TOPIC` for a group of commands, the exit codes, a kind of error."""

import re
from pathlib import Path
from typing import Final, NamedTuple

import click

import tensorstore_ck
from tensorstore_ck import errors
from tensorstore_ck.cli.command_groups import GROUPS, write_group
from tensorstore_ck.errors import BY_KIND

USAGE: Final = 2
INTERRUPTED: Final = 130
EXIT_CODES: Final = "exit-codes"
TROUBLESHOOTING: Final = Path(tensorstore_ck.__file__).parent / "troubleshooting.md"


def topic_page(program: click.Group, topic: str) -> str | None:
    """The page of a topic; None if there is no such topic."""
    if topic in GROUPS:
        formatter = click.HelpFormatter(max_width=100)
        write_group(program, topic, formatter)
        return formatter.getvalue().rstrip()
    if topic == EXIT_CODES:
        return "\n".join(["Exit codes, and kinds of errors with --json (`tsck help KIND` describes one):", *help_lines()])
    return _entry(topic) if topic in BY_KIND else None


def _entry(kind: str) -> str:
    """The entry of an error in the page of troubleshooting, as text without links."""
    _, _, entry = TROUBLESHOOTING.read_text("utf-8").partition(f"\n## {kind}\n")
    entry = re.sub(r"\[([^]]+)]\([^)]+\)", r"\1", entry.partition("\n## ")[0]).replace("**", "").strip()
    return "\n\n".join(
        [kind, *(click.wrap_text(part, 100) if not part.startswith(("-", "```", "|")) else part for part in entry.split("\n\n"))]
    )


class ExitCode(NamedTuple):
    """A code, and when a command exits with it."""

    code: int
    kind: str
    """As ``--json`` has it; empty for success."""
    meaning: str


def exit_codes() -> list[ExitCode]:
    """All of them, in order."""
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.StoreError)}
    of_errors = [ExitCode(kind.exit_code, kind.kind, (kind.__doc__ or "").splitlines()[0]) for kind in kinds - {errors.StoreError}]
    own = [
        ExitCode(0, "", "Done."),
        ExitCode(errors.StoreError.exit_code, errors.StoreError.kind, "An error of no other kind; or a bug, with its traceback."),
        ExitCode(USAGE, "usage", "The command line is wrong."),
        ExitCode(INTERRUPTED, "interrupted", "Ctrl-C; unpublished snapshots are not visible."),
    ]
    return sorted([*own, *of_errors])


def help_lines() -> list[str]:
    """The table, for ``tsck --help``."""
    rows = exit_codes()
    width = max(len(row.kind) for row in rows)
    return [f"  {row.code:3}  {row.kind.ljust(width)}  {row.meaning}" for row in rows]

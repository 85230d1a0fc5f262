"""The commands by what a user wants to do, the module of each, and how the help lists them.

`tsck help TOPIC` describes a group of commands, the exit codes, or a kind of error.
Options that choose a store may stand before the command: ``tsck -s ./ckpt log``.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click

import tensorstore_ck
from tensorstore_ck import errors
from tensorstore_ck.errors import BY_KIND

GROUPS: Final = {
    "save": ("Save and restore", ("init", "put", "get", "watch", "follow", "verify-resume", "staging")),
    "look": ("Look at what there is", ("log", "show", "diff", "find", "bisect", "usage", "advise", "plan")),
    "keep": (
        "Name snapshots, keep them, let them go",
        ("branch", "reset", "tag", "untag", "annotate", "mark", "pin", "unpin", "policy", "quota", "forget", "undo", "gc"),
    ),
    "move": ("Move snapshots in, out and elsewhere", ("import", "export", "copy", "recode", "tier")),
    "trust": ("Sign refs, and check who did", ("keygen", "sign", "verify", "prove", "verify-files")),
    "repair": ("Check and repair", ("fsck", "accept-log", "adopt", "salvage", "probe", "doctor")),
    "serve": ("Pages, metrics, shells", ("ui", "catalog", "exporter", "completion")),
}
"""Name of a group -> what it is for, and its commands."""
_TOGETHER: Final = {
    "cmd_advise_plan": ("advise", "plan"),
    "cmd_catalog": ("catalog", "find"),
    "cmd_init_probe_salvage": ("init", "probe", "accept-log", "adopt", "salvage"),
    "cmd_log_show_diff": ("log", "show", "diff"),
    "cmd_pin_forget_gc": ("pin", "unpin", "forget", "undo", "gc"),
    "cmd_policy_quota": ("policy", "quota"),
    "cmd_put_get": ("put", "get"),
    "cmd_recode_tier": ("recode", "tier"),
    "cmd_refs": ("branch", "reset", "tag", "untag", "annotate", "mark"),
    "cmd_sign": ("keygen", "sign", "verify", "verify-files"),
    "cmd_ui_exporter": ("ui", "exporter"),
    "cmd_watch_follow": ("watch", "follow"),
}
_MODULES: Final = {name: module for module, names in _TOGETHER.items() for name in names}
COMMANDS: Final = {name: _MODULES.get(name, f"cmd_{name.replace('-', '_')}") for _, names in GROUPS.values() for name in names}
"""Command -> its module, which is loaded when the command is asked for."""
FIRST: Final = ("init", "put", "get", "log", "show", "diff", "policy", "gc", "fsck", "ui")
"""The commands that a newcomer needs."""


def write_commands(program: click.Group, formatter: click.HelpFormatter) -> None:
    """The first commands with a line each, and the names of all of them by group."""
    with formatter.section("Commands to begin with"):
        formatter.write_dl(_described(program, FIRST))
    with formatter.section("All commands"):
        formatter.write_dl([(group, ", ".join(commands)) for group, (_, commands) in GROUPS.items()])


def _described(program: click.Group, names: Iterable[str]) -> list[tuple[str, str]]:
    with click.Context(program) as ctx:
        commands = ((name, program.get_command(ctx, name)) for name in names)
        return [(name, command.get_short_help_str(limit=90)) for name, command in commands if command is not None]


USAGE: Final = 2
INTERRUPTED: Final = 130
EXIT_CODES: Final = "exit-codes"
TROUBLESHOOTING: Final = Path(tensorstore_ck.__file__).parent / "troubleshooting.md"


def topic_page(program: click.Group, topic: str) -> str | None:
    """The page of a topic; None if there is no such topic."""
    if topic in GROUPS:
        purpose, commands = GROUPS[topic]
        formatter = click.HelpFormatter(max_width=100)
        with formatter.section(purpose):
            formatter.write_dl(_described(program, commands))
        formatter.write_paragraph()
        formatter.write_text("`tsck help COMMAND` has the options and examples of one.")
        return formatter.getvalue().rstrip()
    if topic == EXIT_CODES:
        rows = exit_codes()
        width = max(len(row.kind) for row in rows)
        lines = [f"  {row.code:3}  {row.kind.ljust(width)}  {row.meaning}" for row in rows]
        return "\n".join(["Exit codes, and kinds of errors with --json (`tsck help KIND` describes one):", *lines])
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


LEADING: Final = ("-s", "--store", "--storage-option", "--cache-dir", "--state-dir", "--rollback", "--allow-place")
NO_PAGER: Final = "--no-pager"
_LEADING_FLAGS: Final = (NO_PAGER, "--json", "--single-writer-unsafe", "--no-sync")


def split_leading(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options that choose a store and stand before the command, with their values; and the rest."""
    at = 0
    while at < len(arguments):
        name, equals, _ = arguments[at].partition("=")
        if arguments[at] in LEADING:
            at += 2
        elif arguments[at] in _LEADING_FLAGS or (equals and name in LEADING) or (name.startswith("-s") and not name.startswith("--")):
            at += 1
        else:
            break
    return list(arguments[:at]), list(arguments[at:])

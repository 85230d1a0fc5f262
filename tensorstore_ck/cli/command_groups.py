"""The commands by what a user wants to do, the module of each, and how the help lists them."""

from collections.abc import Iterable
from typing import Final

import click

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


def write_group(program: click.Group, group: str, formatter: click.HelpFormatter) -> None:
    """The commands of a group, a line each."""
    purpose, commands = GROUPS[group]
    with formatter.section(purpose):
        formatter.write_dl(_described(program, commands))
    formatter.write_paragraph()
    formatter.write_text("`tsck help COMMAND` has the options and examples of one.")


def _described(program: click.Group, names: Iterable[str]) -> list[tuple[str, str]]:
    with click.Context(program) as ctx:
        commands = ((name, program.get_command(ctx, name)) for name in names)
        return [(name, command.get_short_help_str(limit=90)) for name, command in commands if command is not None]

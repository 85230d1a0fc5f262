"""The commands by what a user wants to do, the module of each, and how the help lists them."""

from collections.abc import Iterable
from typing import Final

import click

GROUPS: Final = {
    "save": ("Save and restore", {
        "init": "cmd_init_probe_salvage",
        "put": "cmd_put_get",
        "get": "cmd_put_get",
        "watch": "cmd_watch",
        "follow": "cmd_follow",
        "verify-resume": "cmd_verify_resume",
        "staging": "cmd_staging",
    }),
    "look": ("Look at what there is", {
        "log": "cmd_log_show_diff",
        "show": "cmd_log_show_diff",
        "diff": "cmd_log_show_diff",
        "find": "cmd_catalog",
        "bisect": "cmd_bisect",
        "usage": "cmd_usage",
        "advise": "cmd_advise",
        "plan": "cmd_plan",
    }),
    "keep": ("Name snapshots, keep them, let them go", {
        "branch": "cmd_refs",
        "reset": "cmd_refs",
        "tag": "cmd_refs",
        "untag": "cmd_refs",
        "annotate": "cmd_refs",
        "mark": "cmd_refs",
        "pin": "cmd_pin_forget_gc",
        "unpin": "cmd_pin_forget_gc",
        "policy": "cmd_policy",
        "quota": "cmd_quota",
        "forget": "cmd_pin_forget_gc",
        "undo": "cmd_pin_forget_gc",
        "gc": "cmd_pin_forget_gc",
    }),
    "move": ("Move snapshots in, out and elsewhere", {
        "import": "cmd_import",
        "export": "cmd_export",
        "copy": "cmd_copy",
        "recode": "cmd_recode_tier",
        "tier": "cmd_recode_tier",
    }),
    "trust": ("Sign refs, and check who did", {
        "keygen": "cmd_sign",
        "sign": "cmd_sign",
        "verify": "cmd_sign",
        "prove": "cmd_prove",
        "verify-files": "cmd_sign",
    }),
    "repair": ("Check and repair", {
        "fsck": "cmd_fsck",
        "accept-log": "cmd_init_probe_salvage",
        "adopt": "cmd_init_probe_salvage",
        "salvage": "cmd_init_probe_salvage",
        "probe": "cmd_init_probe_salvage",
        "doctor": "cmd_doctor",
    }),
    "serve": ("Pages, metrics, shells", {
        "ui": "cmd_ui",
        "catalog": "cmd_catalog",
        "exporter": "cmd_exporter",
        "completion": "cmd_completion",
    }),
}  # fmt: skip
"""Name of a group -> what it is for, and its commands, each with its module, which is loaded when the command is asked for."""
COMMANDS: Final = {name: module for _, commands in GROUPS.values() for name, module in commands.items()}
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

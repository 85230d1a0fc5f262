"""Hooks of mkdocs (mkdocs.yml): the help of the commands becomes pages, and searches find guides first.

A line ``::: tsck GROUP`` becomes the help of each command of the group, ``::: tsck`` the options that most commands take.
"""

import inspect
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import click

from tensorstore_ck.cli import main
from tensorstore_ck.cli.command_groups import COMMANDS, GROUPS

WIDTH = 110


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    if page.file.src_uri.startswith(("reference/", "decisions/", "cli")):
        page.meta["search"] = {"boost": 0.5}
    elif page.file.src_uri == "troubleshooting.md":
        page.meta["search"] = {"boost": 2}
    markdown = re.sub(r"^::: tsck (\w+)$", lambda found: "\n".join(_group(found[1])), markdown, flags=re.MULTILINE)
    return re.sub(r"^::: tsck$", lambda _: "\n".join(_block(_options(main, shared=True))), markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Called by mkdocs with each page: ``::`` before a block of code in a docstring is no text."""
    return html.replace("<p>::</p>", "").replace("::</p>", ":</p>")


def _group(name: str) -> Iterator[str]:
    for command in GROUPS[name][1]:
        yield from _command(f"tsck {command}", _of(command))


def _of(name: str) -> click.Command:
    command = main.get_command(click.Context(main), name)
    assert command is not None
    return command


def _command(path: str, command: click.Command) -> Iterator[str]:
    """A heading, the description, and a block of usage, options and examples; of each subcommand, too."""
    description = inspect.cleandoc(command.help or "").replace("\b\n", "")
    yield from ("", f"{'#' * (path.count(' ') + 1)} {path} {{ #{path.replace(' ', '-')} }}", "", description, "")
    context = click.Context(command, info_name=path)
    pieces = " ".join(command.collect_usage_pieces(context))
    yield from _block([f"{path} {pieces}", "", *_options(command, shared=False)])
    if examples := re.findall(r"^  (.+)", command.epilog or "", re.MULTILINE):
        yield from _block(examples)
    for name, subcommand in getattr(command, "commands", {}).items():
        yield from _command(f"{path} {name}", subcommand)


def _block(lines: list[str]) -> list[str]:
    return ["```text", *"\n".join(lines).strip().splitlines(), "```", ""]


def _options(command: click.Command, *, shared: bool) -> list[str]:
    """The options as in a terminal: those that most commands take, or the others of a command."""
    formatter = click.HelpFormatter(width=WIDTH, max_width=WIDTH)
    common = _common()
    rows = common if shared else [row for row in _rows(command) if row not in common]
    if rows:
        formatter.write_dl(rows, col_max=34)
    return formatter.getvalue().splitlines()


def _common() -> list[tuple[str, str]]:
    count: Counter[tuple[str, str]] = Counter()
    for name in COMMANDS:
        count.update(_rows(_of(name)))
    return [row for row, times in count.items() if times > len(COMMANDS) / 2]


def _rows(command: click.Command) -> list[tuple[str, str]]:
    """Each option, and what it does."""
    context = click.Context(command)
    options = (option for option in command.get_params(context) if isinstance(option, click.Option))
    return [row for option in options if (row := option.get_help_record(context))]

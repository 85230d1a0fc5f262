"""Completes the commands in messages, so that they work as they are printed: on the store of this command."""

import json
import re
import shlex
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from tensorstore_ck.common.printed_commands import COMMAND
from tensorstore_ck.redaction import display_url, hidden_options


def store_arguments(
    context: click.Context, url: str | None, storage_options: Mapping[str, Any], files: Mapping[str, str | None], places: Sequence[str]
) -> list[str]:
    """The arguments that chose the store. Leaves out those of the environment and the current folder: they also hold for the next command.

    The values of secrets are not repeated.
    """

    def is_given(name: str) -> bool:
        return context.get_parameter_source(name) is ParameterSource.COMMANDLINE

    arguments = ["-s", display_url(url)] if url and (is_given("store") or is_given("url")) else []
    for name, value in hidden_options(storage_options).items():
        text = value if isinstance(value, str) else json.dumps(value)
        arguments += ["--storage-option", f"{name}={text}"]
    arguments += [word for place in places for word in ("--allow-place", place)]
    for name, file in files.items():
        arguments += [f"--{name.replace('_', '-')}", file] if file and is_given(name) else []
    return arguments


def show_completed(complete: Callable[[str], str]) -> None:
    """Completes the commands in warnings of any thread, until `Program.main` ends."""
    show = warnings.showwarning

    def show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
        show(complete(str(message)), *where, **more)

    warnings.showwarning = show_warning


def complete(context: click.Context, text: str, arguments: Sequence[str]) -> str:
    """`text`, with `arguments` added to each command that works on a store; a command that names its store gets no other."""
    root = context.find_root()
    pairs = list(zip(arguments[::2], arguments[1::2], strict=True))
    storage = [word for option, value in pairs if option == "--storage-option" for word in (option, value)]
    state = [word for option, value in pairs if option == "--state-dir" for word in (option, value)]

    def completed(found: re.Match[str]) -> str:
        name, rest = found.groups()
        command = root.command.get_command(root, name) if isinstance(root.command, click.Group) else None
        takes_store = command is not None and any(parameter.name == "store" for parameter in command.params)
        takes_url = command is not None and any(parameter.name == "url" for parameter in command.params)
        names_store = bool({"-s", "--store"} & set(rest.split())) or (takes_url and rest.strip() != "")
        more = arguments if not names_store else [*(storage if "://" in rest else ()), *state]
        return f"`tsck {name}{rest} {shlex.join(more)}`" if takes_store and more else found[0]

    return COMMAND.sub(completed, text)

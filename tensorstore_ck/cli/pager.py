"""Prints long results through a pager, as git does: only as text, and only where stdout is a terminal.

TSCK_PAGER or else PAGER names it, and a shell runs it; ``cat`` or nothing turns it off, as ``--no-pager`` does. By default it is ``less
-FRX``, which shows colours, and ends at once if everything fits on the screen.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import click

from tensorstore_ck.cli.output import emit, shown
from tensorstore_ck.cli.standard_streams import shows_colours

PAGER_VARIABLES: Final = ("TSCK_PAGER", "PAGER")
DEFAULT_PAGER: Final = "less -FRX"
_LESS: Final = {"LESS": "FRX", "LV": "-c"}
"""The environment of a pager without options: git's values, where they are not set."""
_NO_PAGER: Final = "tensorstore_ck.no_pager"


def _note(context: click.Context, _: click.Parameter, given: bool) -> None:
    context.meta[_NO_PAGER] = given or context.meta.get(_NO_PAGER, False)


no_pager_option: Final = click.option(
    "--no-pager", is_flag=True, expose_value=False, callback=_note, help="On a terminal, print long results without a pager."
)


def emit_paged(document: object, lines: Iterable[str], *, as_json: bool) -> None:
    """As `emit`, through a pager if stdout is a terminal."""
    command = None if as_json or not sys.stdout.isatty() else _command()
    if command is None:
        emit(document, lines, as_json=as_json)
    else:
        _page(lines, command)


def _command() -> str | None:
    """The pager; None if there is none, or it is turned off."""
    if click.get_current_context().meta.get(_NO_PAGER):
        return None
    command = next((os.environ[name] for name in PAGER_VARIABLES if name in os.environ), DEFAULT_PAGER)
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    return command if words and words != ["cat"] and shutil.which(words[0]) is not None else None


def _page(lines: Iterable[str], command: str) -> None:
    with _ignoring_ctrl_c(), subprocess.Popen(["/bin/sh", "-c", command], stdin=subprocess.PIPE, env={**_LESS, **os.environ}) as pager:
        assert pager.stdin is not None
        shown_line = shown if shows_colours() else lambda line: click.unstyle(shown(line))
        with suppress(BrokenPipeError):  # the user has seen enough
            for line in lines:
                pager.stdin.write(f"{shown_line(line)}\n".encode(errors="replace"))
        with suppress(BrokenPipeError):
            pager.stdin.close()
        pager.wait()


@contextmanager
def _ignoring_ctrl_c() -> Iterator[None]:
    """Ctrl-C is for the pager, which stays; without it the shell and the pager would read the keyboard at the same time."""
    before = signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which the pager would inherit
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)

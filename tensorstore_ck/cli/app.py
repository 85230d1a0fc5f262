"""The `tsck` command group: its commands, and how errors become exit codes.

Every `StoreError` becomes one line on stderr, which names the command that prints what to do (with ``--json``: a document on stdout), and
its kind's exit code; 2 is a misuse of the command line, 130 an interrupt. Anything else is a bug, and keeps its traceback. With
``TSCK_DEBUG=1`` the decisions of a command, as `tensorstore_ck` logs them at debug level, go to a file.
"""

import difflib
import importlib
import logging
import os
import platform
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NoReturn

import click
import platformdirs

import tensorstore_ck
from tensorstore_ck.cli import standard_streams
from tensorstore_ck.cli.command_groups import COMMANDS, INTERRUPTED, NO_PAGER, USAGE, split_leading, topic_page, write_commands
from tensorstore_ck.cli.output import clear_line, emit, emit_words, printable, say
from tensorstore_ck.cli.pager import no_pager_option
from tensorstore_ck.common.printed_commands import TAKE_STORE
from tensorstore_ck.errors import InvalidOptionError, NotAStoreError, NotFoundError, StoreError
from tensorstore_ck.redaction import redacted

LISTS: Final = "`tsck branch` lists branches, `tsck tag` tags, `tsck log` snapshots, and `tsck show ADDRESS` the content of one."
REMOVES: Final = "`tsck forget ADDRESS` removes a snapshot, branch or tag, and `tsck undo` brings it back, for a day."
RESTORES: Final = "`tsck get ADDRESS FILE` writes a snapshot to a file; in Python: store.checkout(ADDRESS)."
ELSEWHERE: Final = {"ls": LISTS, "list": LISTS, "rm": REMOVES, "remove": REMOVES, "delete": REMOVES, "restore": RESTORES, "load": RESTORES}
"""Names that other programs have for what commands here do -> which."""
HELP: Final = """Keep every snapshot of training state in one store that never holds the same bytes twice.

\b
A first look:
  tsck init ./ckpt                             make a store
  tsck put model.pt --ref runs/gpt -s ./ckpt   store a file as a snapshot
  tsck log runs/gpt -s ./ckpt                  list the snapshots
  tsck get runs/gpt copy.pt -s ./ckpt          write one to a file

\b
An ADDRESS names a snapshot:
  runs/gpt       a branch or tag
  runs/gpt@1000  its newest snapshot of step 1000
  runs/gpt~2     two before it
  9f86d081       the first digits of a root

With TSCK_STORE set, or inside the store's folder, -s is not needed."""
TOPICS: Final = "`tsck help GROUP`, `tsck help COMMAND` and `tsck help exit-codes` say more."
COMPLETION_VARIABLE: Final = "_TSCK_COMPLETE"
MOST_NEAR: Final = 3
"""How many stores an error names at most."""
ALIASES: Final = {"checkout": "get"}
RENAMED_OPTIONS: Final = {
    "allow-bad": "allow-marked",
    "daily": "growth-per-day",
    "leave-out": "exclude",
    "select": "include",
    "skip": "exclude",
    "take-places": "claim-locations",
}
"""Options' earlier spellings, which work for one more release."""


class Program(click.Group):
    """The group of all commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Loads the command's module if it is not loaded yet."""
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in self.commands and name in COMMANDS:
            module = importlib.import_module(f"tensorstore_ck.cli.{COMMANDS[name]}")
            self.commands.update(
                (command.name, command) for command in vars(module).values() if isinstance(command, click.Command) and command.name
            )
        return self.commands.get(name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands to begin with, and the names of all others."""
        write_commands(self, formatter)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does; for an unknown command, names similar ones."""
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            close = [f"`tsck {candidate}`" for candidate in difflib.get_close_matches(name, [*COMMANDS, *ALIASES], 3)]
            meant = ELSEWHERE.get(name) or (f"did you mean {' or '.join(close)}?" if close else "`tsck --help` lists them.")
            raise click.UsageError(f"There is no command {name!r}: {meant}", ctx)
        return super().resolve_command(ctx, args)

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *others: Any, **more: Any) -> NoReturn:
        """Runs one command and exits; or answers a shell that completes its words."""
        if instruction := os.environ.get(COMPLETION_VARIABLE):
            from tensorstore_ck.cli.shell_completion import answer  # noqa: PLC0415 - only a shell's question needs it

            emit_words(answer(self, instruction))
            sys.exit(0)
        arguments = list(sys.argv[1:] if args is None else args)
        more["standalone_mode"] = False
        output = standard_streams.prepare()
        if not standard_streams.shows_colours():
            more["color"] = False
        logger, lines = logging.getLogger("tensorstore_ck"), _Lines(logging.WARNING)
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            logger.addHandler(lines)
            try:
                code = self._run(arguments, prog_name or "tsck", *others, **more)
                lost = standard_streams.lost_output(output)
                sys.exit(code if lost is None or code else _lost_output(lost))
            finally:
                logger.removeHandler(lines)

    def _run(self, arguments: list[str], *others: Any, **more: Any) -> int:
        as_json = "--json" in arguments
        match arguments:
            case ["help", topic] if page := topic_page(self, topic):
                for line in page.splitlines():
                    say(line)
                return 0
        try:
            with debug_log():
                code = super().main(_arranged(arguments) or ["--help"], *others, **more)
        except click.UsageError as exc:
            where = exc.ctx.command_path if exc.ctx else "tsck"
            meant = _store_among(arguments) if "unexpected extra argument" in exc.format_message() else ""
            _fail("usage", f"{_one_sentence(exc.format_message())} See `{where} --help`{meant}", where, as_json=as_json)
            return USAGE
        except click.Abort:
            _fail("interrupted", "interrupted; unpublished snapshots are not visible", "", as_json=as_json)
            return INTERRUPTED
        except StoreError as exc:
            meant = _store_among(arguments) if isinstance(exc, NotAStoreError | NotFoundError) else ""
            if isinstance(exc, NotAStoreError):
                meant = meant or _stores_near(exc.object_id)
            _fail(exc.kind, f"{exc}{meant}", exc.object_id, as_json=as_json, more=f" (see: tsck help {exc.kind})")
            return exc.exit_code
        return code if isinstance(code, int) else 0


def _lost_output(exc: OSError) -> int:
    """Prints that output was lost, unless its reader stopped; the exit code."""
    if isinstance(exc, BrokenPipeError):
        return StoreError.exit_code
    from tensorstore_ck.backend.os_errors import store_error  # noqa: PLC0415 - what prints help needs no backend

    error = store_error(exc, "write", "the output")
    # A second run would only repeat the output.
    what = f"the command has done its work, but its output is lost: {exc.strerror}"
    _fail(error.kind, what, "", as_json=False)
    return error.exit_code


def _store_among(arguments: list[str]) -> str:
    """The command to type instead, if a store was given as an argument where the command takes it as ``-s``. Repeats no other argument."""
    if not arguments or arguments[0] not in TAKE_STORE:
        return ""
    for at, word in enumerate(arguments[1:], 1):
        is_option = word.startswith("-") or arguments[at - 1].startswith("-")
        if not is_option and os.path.isfile(os.path.join(word, "store.json")):
            return f"; did you mean `tsck {shlex.join([arguments[0], '-s', word])}`?"
    return ""


def _stores_near(path: str) -> str:
    """Names the stores in, or next to, a folder that is not a store."""
    for folder in (path, os.path.dirname(path)):
        with suppress(OSError):
            there = [os.path.relpath(each.path) for each in os.scandir(folder) if os.path.isfile(os.path.join(each.path, "store.json"))]
            if there:
                return f"; there {'is a store' if len(there) == 1 else 'are stores'} at {shlex.join(sorted(there)[:MOST_NEAR])}"
    return ""


def _one_sentence(message: str) -> str:
    """Click's message on one line, including its guess."""
    message = re.sub(r"\.? \(?Did you mean (.*)\?\)?$", r": did you mean \1?", " ".join(message.split()))
    return message if message.endswith("?") else f"{message.removesuffix('.')}."


def _arranged(arguments: list[str]) -> list[str]:
    """The command first: options of the command that stand before it come after it; ``help`` and ``version`` are options."""
    leading, rest = split_leading(arguments)
    match rest:
        case ["version"]:
            return ["--version"]
        case ["help"]:
            return ["--help"]
        case ["help", *command]:
            return [*command, "--help"]
        case [command, *more]:
            of_program = [option for option in leading if option == NO_PAGER]
            return [*of_program, command, *(option for option in leading if option != NO_PAGER), *more]
    if leading:
        raise click.UsageError(f"There is no command after {' '.join(leading)}: write it there, as in `tsck -s ./ckpt log`.")
    return []


def _renamed(option: str) -> str:
    """The spelling of an option today. click asks for each that a command line has."""
    if option in RENAMED_OPTIONS:
        say(f"tsck: --{option} is deprecated: use --{RENAMED_OPTIONS[option]}", err=True)
    return RENAMED_OPTIONS.get(option, option)


def _fail(kind: str, message: str, object_id: str, *, as_json: bool, more: str = "") -> None:
    if as_json:
        emit({"error": {"kind": kind, "message": redacted(message), "object": object_id}}, (), as_json=True)
    else:
        say(f"tsck: {printable(message)}{more}", err=True)


DEBUG_VARIABLE: Final = "TSCK_DEBUG"
_FORM: Final = "%(asctime)s.%(msecs)03d %(process)d %(threadName)s %(name)s: %(message)s"


@contextmanager
def debug_log() -> Iterator[None]:
    """Appends what the package logs to a file while the block runs, if the user asked for it, and names the file at the end.

    Raises:
        InvalidOptionError: the file cannot be written.
    """
    wanted = os.environ.get(DEBUG_VARIABLE, "")
    if wanted in ("", "0"):
        yield
        return
    path = platformdirs.user_state_path("tensorstore_ck", appauthor=False) / "debug.log" if wanted == "1" else Path(wanted)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise InvalidOptionError(f"{DEBUG_VARIABLE} names a file that cannot be written: {exc}", object_id=DEBUG_VARIABLE) from exc
    logger = logging.getLogger("tensorstore_ck")
    before = logger.level
    handler = logging.StreamHandler(os.fdopen(fd, "a", encoding="utf-8"))
    handler.setFormatter(_Redacted(_FORM, "%Y-%m-%d %H:%M:%S"))
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    logger.debug("tsck %s, Python %s", tensorstore_ck.__version__, platform.python_version())  # no arguments: they may be secrets
    try:
        yield
    except StoreError:
        logger.debug("the command failed", exc_info=True)
        raise
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)
        handler.stream.close()
        say(f"tsck: what was decided, and why, is in {path}", err=True)


class _Redacted(logging.Formatter):
    """Leaves out secrets of URLs."""

    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


class _Lines(logging.Handler):
    """Prints log records as warnings are printed."""

    def emit(self, record: logging.LogRecord) -> None:
        clear_line()
        say(f"tsck: warning: {printable(record.getMessage())}", err=True)
        for line in logging.Formatter().formatException(record.exc_info).splitlines() if record.exc_info else ():
            say(line, err=True)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Prints a warning's text, without the place in the code."""
    say(f"tsck: warning: {printable(str(message))}", err=True)


_SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 100, "token_normalize_func": _renamed}


@click.group(cls=Program, help=HELP, epilog=TOPICS, context_settings=_SETTINGS)
@click.version_option(tensorstore_ck.__version__, prog_name="tsck", message="%(prog)s %(version)s")
@no_pager_option
def main() -> None:
    """The entry point of ``tsck``."""

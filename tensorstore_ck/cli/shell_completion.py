"""The candidates that bash, zsh and fish ask for when Tab is pressed, and the scripts that make them ask. Prints nothing on errors.

click has the words and the scripts of zsh and fish. bash gets a script of its own: it cuts words at ``@``, ``=`` and ``:`` where they are
not quoted, and replaces only the piece that it names (of ``runs/gpt@10``: ``@10``).
"""

import io
import os
import shlex
import warnings
from contextlib import redirect_stderr, suppress
from typing import Any, ClassVar, Final

import click
from click.shell_completion import CompletionItem, FishComplete, ShellComplete, ZshComplete

from tensorstore_ck.cli.app import COMPLETION_VARIABLE
from tensorstore_ck.cli.command_groups import LEADING, NO_PAGER, split_leading

PROGRAM: Final = "tsck"
REPLACED_VARIABLE: Final = "TSCK_REPLACED"
"""The piece of the word that bash replaces."""
_BASH: Final = """\
%(complete_func)s() {
    local type value
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("$value") ;;
        esac
    done < <(COMP_LINE=$COMP_LINE COMP_POINT=$COMP_POINT TSCK_REPLACED=$2 %(complete_var)s=bash_complete "$1" 2>/dev/null)
}
complete -o nosort -F %(complete_func)s %(prog_name)s
"""


class _Arranged(ShellComplete):
    """Understands options that choose the store before the command, too."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[Any]]:
        leading, rest = split_leading(args)
        if leading and not rest and leading[-1] in LEADING:
            return [CompletionItem(incomplete, type="dir")]
        leading = [option for option in leading if option != NO_PAGER]
        return super().get_completions([*rest[:1], *leading, *rest[1:]] if rest else [], incomplete)

    def source(self) -> str:
        return self.source_template % self.source_vars()


class _Bash(_Arranged):
    name: ClassVar = "bash"
    source_template: ClassVar = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
        words = _words(line)
        self._incomplete = words[-1]
        return words[1:-1], words[-1]

    def format_completion(self, item: CompletionItem[Any]) -> str:
        cut = self._incomplete.removesuffix(os.environ[REPLACED_VARIABLE])
        value = cut.partition("=")[2] if cut.startswith("-") else cut  # of --good=runs/gpt@1000, click completes what follows the =
        return f"{item.type},{item.value.removeprefix(value)}"


class _Zsh(_Arranged, ZshComplete):
    pass


class _Fish(_Arranged, FishComplete):
    pass


SHELLS: Final[dict[str, type[_Arranged]]] = {"bash": _Bash, "zsh": _Zsh, "fish": _Fish}


def script(shell: str, program: click.Command) -> str:
    """The script for the shell to source."""
    return SHELLS[shell](program, {}, PROGRAM, COMPLETION_VARIABLE).source()


def answer(program: click.Command, instruction: str) -> str:
    """The answer to ``bash_complete`` and the like: empty if anything goes wrong."""
    shell, _, what = instruction.partition("_")
    with suppress(Exception), redirect_stderr(io.StringIO()), warnings.catch_warnings(action="ignore"):
        if what == "source":
            return script(shell, program)
        offered = SHELLS[shell](program, {}, PROGRAM, COMPLETION_VARIABLE).complete()
        return f"{offered}\n" if offered else ""
    return ""


def _words(line: str) -> list[str]:
    """The words of a command line whose last one may be empty, or have a quote that is not closed."""
    lexer = shlex.shlex(line, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = list[str]()
    try:
        words.extend(lexer)
    except ValueError:
        return [*words, lexer.token]
    return words if line[-1:] and not line[-1].isspace() else [*words, ""]

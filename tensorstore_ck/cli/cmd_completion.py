"""The command completion: prints or installs the script that completes the words of `tsck` commands in a shell."""

import os
from pathlib import Path
from typing import Final

import click
import platformdirs

from tensorstore_ck.cli.options import command, json_option
from tensorstore_ck.cli.output import emit, printable
from tensorstore_ck.errors import InvalidOptionError

_ADVICE: Final = {
    "bash": "new shells load it if the package bash-completion is installed; else add `source {path}` to ~/.bashrc",
    "zsh": "add `fpath=({folder} $fpath)` to ~/.zshrc, before the line that calls compinit",
    "fish": "new shells load it",
}


@command(
    "Complete commands, refs, steps and metrics in a shell.",
    "tsck completion bash --install",
    "tsck completion zsh > _tsck",
    "tsck completion fish | source",
)
@click.argument("shell", type=click.Choice(list(_ADVICE)), metavar="bash|zsh|fish")
@click.option("--install", is_flag=True, help="Write it to the user's folder for completions instead of printing it.")
@json_option
@click.pass_context
def completion(context: click.Context, shell: str, *, install: bool, as_json: bool) -> None:
    """Print the script that completes commands, options, refs, steps after @ and metrics (--plot) in a shell.

    bash and zsh take it by eval "$(tsck completion bash)" in ~/.bashrc or ~/.zshrc, or after --install.

    Refs, steps and metrics are those of the store of -s, of TSCK_STORE or of the current folder. For a remote store, only names that this
    host has read are offered, so that Tab asks no server. --install changes no file but the one that it names.
    """
    from tensorstore_ck.cli.shell_completion import script  # noqa: PLC0415 - only this command needs it

    text = script(shell, context.find_root().command)
    if not install:
        emit({"shell": shell, "script": text}, text.splitlines(), as_json=as_json)
        return
    path = _place(shell)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as exc:
        raise InvalidOptionError(f"the script cannot be written: {exc}", object_id=str(path)) from exc
    advice = _ADVICE[shell].format(path=path, folder=path.parent)
    emit({"shell": shell, "path": path, "next": advice}, [f"wrote {printable(path)}", printable(advice)], as_json=as_json)


def _place(shell: str) -> Path:
    """The files in which the shell, or the packages that extend it, look for a user's completions."""
    if shell == "fish":
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "fish/completions/tsck.fish"
    data = platformdirs.user_data_path()
    if shell == "zsh":
        return data / "zsh/site-functions/_tsck"
    return Path(os.environ.get("BASH_COMPLETION_USER_DIR") or data / "bash-completion") / "completions/tsck"

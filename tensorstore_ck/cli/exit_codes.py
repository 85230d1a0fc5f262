"""The exit codes of `tsck`: one for each kind of error in `errors`."""

from typing import Final, NamedTuple

from tensorstore_ck import errors

USAGE: Final = 2
INTERRUPTED: Final = 130


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

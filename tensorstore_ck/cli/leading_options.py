"""The options that choose a store may stand before the command: ``tsck -s ./ckpt log``."""

from collections.abc import Sequence
from typing import Final

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

"""Commands in messages name their store, so that they work as they are printed, whatever the current folder is."""

import re
import shlex
from typing import Final

from tensorstore_ck.errors import StoreError
from tensorstore_ck.redaction import redacted

COMMAND: Final = re.compile(r"`tsck ([a-z-]+)([^`]*)`")
TAKE_URL: Final = frozenset({"init", "probe"})
"""Commands whose argument may be the store."""
TAKE_STORE: Final = TAKE_URL | {
    *("accept-log", "adopt", "advise", "annotate", "bisect", "branch", "checkout", "diff", "export", "forget", "fsck", "gc", "get"),
    *("import", "log", "mark", "pin", "policy", "prove", "put", "quota", "recode", "reset", "salvage", "show", "sign", "staging"),
    *("tag", "tier", "undo", "unpin", "untag", "usage", "verify", "verify-resume", "watch"),
}
"""Commands that take ``-s``."""


def naming_store(text: str, url: str) -> str:
    """`text`, with the store at `url` added to each command that works on a store and names none."""

    def named(found: re.Match[str]) -> str:
        name, rest = found.groups()
        if name not in TAKE_STORE or not url or {"-s", "--store"} & {*rest.split()} or (name in TAKE_URL and rest.strip()):
            return found[0]
        return f"`tsck {name}{rest} {'' if name in TAKE_URL else '-s '}{shlex.quote(url)}`"

    return COMMAND.sub(named, text)


def name_store(error: BaseException, url: str) -> None:
    """Completes the commands in an error of a store."""
    if isinstance(error, StoreError):
        error.args = (redacted(naming_store(str(error), url)),)

"""Which names a backend takes (relative, ``/``-separated, plain ASCII, no component that begins with a dot), and advice for missing ones.

Names may come from a store, which is not trusted: a name that could leave the store's folder is damage, not a path. The leading
dot is reserved for a backend's own temporaries, so that no object is taken for one.
"""

import re
from collections.abc import Collection
from typing import Final

from tensorstore_ck.errors import CorruptObjectError

MAX_NAME_CHARS: Final = 512
MISSING_ADVICE: Final = (
    "it may have been deleted, or this is not the store you meant; run `tsck fsck` to see what it hits, and restore an older snapshot"
)
"""For errors about an object that is not there."""

_COMPONENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
NAME: Final = re.compile(rf"(?=.{{1,{MAX_NAME_CHARS}}}\Z){_COMPONENT}(?:/{_COMPONENT})*")
"""What all of a valid name matches."""
_PREFIX = re.compile(rf"(?:{_COMPONENT}/)*")


def check_name(name: str) -> str:
    """`name`, if it is valid."""
    if not NAME.fullmatch(name):
        raise bad_name(name)
    return name


def bad_name(name: str) -> CorruptObjectError:
    """The error for a name that is not valid."""
    return CorruptObjectError(f"{name!r} cannot be an object's name; what named it is damaged: run `tsck fsck`", object_id=name)


def check_prefix(prefix: str) -> str:
    """`prefix`, if it is empty or a folder's name with its ``/``."""
    if len(prefix) > MAX_NAME_CHARS or not _PREFIX.fullmatch(prefix):
        raise CorruptObjectError(f"{prefix!r} cannot be a folder's name", object_id=prefix)
    return prefix


def is_in(folders: Collection[str] | None, name: str) -> bool:
    """Whether `name` is at the root or in one of these folders there; in any, if there is no choice."""
    folder, slash, _ = name.partition("/")
    return folders is None or not slash or folder in folders

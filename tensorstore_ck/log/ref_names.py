"""Valid names of branches and tags: checked when written and when read."""

import re
from typing import Final

from tensorstore_ck.errors import InvalidNameError

MAX_REF_CHARS: Final = 255
"""A name must fit into a key of the ref table."""

_COMPONENT = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
_NAME: Final = re.compile(rf"{_COMPONENT}(/{_COMPONENT}){{0,8}}")
_GLOB: Final = re.compile(rf"[A-Za-z0-9._/*?\[\]!-]{{1,{MAX_REF_CHARS}}}")
_ROOT: Final = re.compile(r"[0-9a-fA-F]{8,64}")


def validate_ref_name(name: object) -> str:
    """`name`, if it is valid. Raises `InvalidNameError` if it is not; the message says why."""
    problem = _problem(name)
    if problem is not None:
        shown = repr(name)[:80]
        raise InvalidNameError(f"{shown} cannot be the name of a branch or tag: {problem}. Use a name like runs/gpt-2", object_id=shown)
    return str(name)


def is_ref_glob(glob: object) -> bool:
    """Whether this is a valid pattern of a policy: a name in which ``*``, ``?`` and ``[...]`` stand for any characters."""
    return isinstance(glob, str) and _GLOB.fullmatch(glob) is not None


def is_ref_name(name: object) -> bool:
    """Whether this is a valid name of a ref."""
    return _problem(name) is None


def _problem(name: object) -> str | None:
    if not isinstance(name, str):
        return f"it is a {type(name).__name__}, not a string"
    if len(name) > MAX_REF_CHARS:
        return f"it is longer than {MAX_REF_CHARS} characters"
    if not _NAME.fullmatch(name):
        return "it must be up to 9 parts joined by '/', each of letters, digits, '.', '_' and '-' and beginning with a letter or digit"
    if ".." in name:
        return "'..' is not allowed"
    if ".lock/" in f"{name}/":
        return "'.lock' at the end of a part is not allowed"
    if _ROOT.fullmatch(name):
        return "it looks like the root of a snapshot"
    return None

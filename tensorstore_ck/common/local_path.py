"""Paths on this host, as users give them."""

import os
import re
from typing import Final

from tensorstore_ck.errors import InvalidOptionError
from tensorstore_ck.redaction import display_url

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+._-]*://|(?:s3a?|gs|gcs|az|abfss?|memory|file|local|https?):/", re.IGNORECASE)
"""pathlib and normpath drop a slash."""


def local_path(path: str | os.PathLike[str], what: str) -> str:
    """The path, with the home folder for ``~``; `what` begins the message.

    Raises:
        InvalidOptionError: it is a URL, which would be a folder of that name below the current one.
    """
    text = os.fspath(path)
    if _URL.match(text):
        shown = display_url(text)
        raise InvalidOptionError(
            f"{what} must be a path on this host, not the URL {shown}; a folder of that name is './{shown}'", object_id=what
        )
    return os.path.expanduser(text)

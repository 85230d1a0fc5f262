"""Which of the locations that a store's log names a host uses. Any writer of the store can name one; so by default a host uses only

- another bucket of the store's own service: its URL names no endpoint, so requests go to the same server as the store's own;
- for a store in a folder, locations in the same parent folder, unless everybody can write there.

All others (other services and hosts, other local paths) must be inside a location that the host allows. A chained URL (``::``) never is.
"""

import os
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import platformdirs

from tensorstore_ck.errors import InvalidOptionError

FILE: Final = "file"
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]+)(.*)")
_SERVICES: Final = {"s3a": "s3", "gcs": "gs", "abfs": "az", "abfss": "az", "local": FILE}
_BUCKETS: Final = {
    "s3": re.compile(r"(?!.*--)[A-Za-z0-9][A-Za-z0-9._-]*"),  # no ARN, and no alias such as x--op-s3: both imply an endpoint
    "gs": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
    "az": re.compile(r"[A-Za-z0-9][A-Za-z0-9-]*"),  # with dots it would be the host of an account
    "memory": re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*"),
}
"""Service -> the buckets whose names imply no endpoint."""

Steps = tuple[str, ...]
"""Service, bucket or host, and the parts of the path."""


def parse_allowed(locations: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """The locations that a host allows, checked.

    Raises:
        InvalidOptionError: one is neither an absolute path nor a URL with a bucket or host.
    """
    found = tuple(os.fspath(each) for each in ((locations,) if isinstance(locations, str | os.PathLike) else locations))
    for location in found:
        if not can_allow(location):
            raise InvalidOptionError(
                f"an allowed location is an absolute path or a URL such as s3://bucket/prefix, without `..` and `::`, not {location!r}",
                object_id="places",
            )
    return found


def places_file() -> Path:
    """The user's file of allowed locations, which commands read: by default ``~/.config/tensorstore_ck/places``."""
    return platformdirs.user_config_path("tensorstore_ck", appauthor=False) / "places"


def can_allow(location: str) -> bool:
    """Whether a location can be allowed, with everything inside of it."""
    return _steps(location) is not None


def is_at_store_endpoint(url: str, store_url: str) -> bool:
    """Whether a location is a bucket of the store's own service and endpoint, so that the store's credentials are for it."""
    location, store = _steps(url), _steps(store_url)
    if location is None or store is None or location[0] != store[0] or location[0] not in _BUCKETS:
        return False
    return location[1] == store[1] or _BUCKETS[location[0]].fullmatch(location[1]) is not None


def is_in_same_bucket(url: str, other: str) -> bool:
    """Whether two URLs name the same service and the same bucket, container or host, and no query; of local paths none is."""
    one, two = _steps(url), _steps(other)
    return one is not None and two is not None and one[0] != FILE and one[:2] == two[:2] and not {"?", "#"} & {*url}


def is_allowed(url: str, store_url: str, allowed: Iterable[str]) -> bool:
    """Whether a host that allows `allowed` uses the location at `url`. Accesses only paths whose names are inside one of them."""
    return is_at_store_endpoint(url, store_url) or any(is_inside(url, location) for location in (*allowed, *_around(store_url)))


def is_inside(url: str, location: str) -> bool:
    """Whether `url` is `location` or below it: ``s3://cold-evil`` is not below ``s3://cold``. Symlinks must not lead out of it."""
    inner, outer = _steps(url), _steps(location)
    if inner is None or outer is None or inner[: len(outer)] != outer:
        return False
    if inner[0] != FILE:
        return True
    real, around = (os.path.realpath("/" + "/".join(steps[1:])) for steps in (inner, outer))
    return os.path.commonpath([real, around]) == around


def _around(store_url: str) -> Sequence[str]:
    """The parent of a store's folder, if not everybody can write there."""
    store = _steps(store_url)
    if store is None or store[0] != FILE or len(store) < 3:
        return ()
    folder = "/" + "/".join(store[1:-1])
    try:
        return () if os.stat(folder).st_mode & stat.S_IWOTH else (folder,)
    except OSError:
        return ()


def _steps(url: str) -> Steps | None:
    """None: neither an absolute path nor a URL with a bucket or host; or it is chained, or contains ``..``."""
    if "::" in url or not url.isprintable():
        return None
    scheme = url.partition("://")[0].lower()
    if os.path.isabs(url) or _SERVICES.get(scheme, scheme) == FILE:
        return _file_steps(url)
    match = _URL.fullmatch(url.partition("?")[0])
    if match is None:
        return None
    path = match[3].rstrip("/").split("/")[1:]
    return None if {".", ".."} & {*path} else (_SERVICES.get(scheme, scheme), match[2], *path)


def _file_steps(url: str) -> Steps | None:
    path = url
    if not os.path.isabs(url):
        parts = urlsplit(url)
        path = unquote(parts.path)
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or not os.path.isabs(path) or "\0" in path:
            return None
    steps = [step for step in path.split("/") if step not in ("", ".")]
    return None if ".." in steps else (FILE, *steps)

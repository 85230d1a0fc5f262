"""Checks free space before a write, so that a full disk leaves no incomplete object.

Knows no backend, no format and no clock. A location of unknown size, such as an object store, passes. Limits that a filesystem does not
report, such as a user's quota, show only when a write fails.
"""

import errno
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self

from tensorstore_ck.common.units import human_bytes, parse_bytes
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError, PermissionDeniedError

_PERCENT: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_NO_SPACE: Final = {errno.ENOSPC, errno.EDQUOT}
_FEW_INODES: Final = 100
_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS}


class Space(NamedTuple):
    """The size of a filesystem."""

    free_bytes: int
    """Bytes that this user can still write."""
    total_bytes: int
    free_inodes: int | None = None
    """Files that this user can still make; None: unlimited or unknown."""


class HasSpace(Protocol):
    """Something that can be written to, such as a backend."""

    url: str

    def space(self) -> Space | None:
        """Its size; None if unknown."""


@dataclass(frozen=True, slots=True)
class MinFree:
    """What must stay free: a part of the filesystem, or a number of bytes."""

    fraction: float = 0.0
    size_bytes: int = 0
    at_most_bytes: int | None = None
    """The part, at most."""

    @classmethod
    def parse(cls, value: object) -> Self:
        """From ``"5%"``, ``"50GB"``, a number of bytes, or 0 for nothing. Raises `InvalidOptionError` if it is none of these."""
        if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())) is not None and float(match[1]) < 100:
            return cls(fraction=float(match[1]) / 100)
        try:
            return cls(size_bytes=parse_bytes(value, "min_free"))
        except InvalidOptionError:
            raise InvalidOptionError(
                f"min_free must be a part below 100% like '5%', a size like '50GB', or a number of bytes, not {value!r}",
                object_id="min_free",
            ) from None

    def of(self, total_bytes: int) -> int:
        """The bytes that must stay free of `total_bytes`."""
        part_bytes = int(self.fraction * total_bytes)
        return self.size_bytes + (part_bytes if self.at_most_bytes is None else min(part_bytes, self.at_most_bytes))

    def __str__(self) -> str:
        most = "" if self.at_most_bytes is None else f", at most {human_bytes(self.at_most_bytes)}"
        return f"min_free={self.fraction * 100:g}%{most}" if self.fraction else f"min_free={human_bytes(self.size_bytes)}"


FOLDER_MIN_FREE: Final = MinFree(fraction=0.01, at_most_bytes=1 << 30)
"""The default for a store in a folder: a disk that is full to the last byte cannot even note what is to be freed."""


def require_free_space(target: HasSpace, min_free: MinFree, needed_bytes: int, what: str) -> int | None:
    """Refuses a write that would leave less than `min_free` free; `what` begins the message.

    Returns how many bytes more could be written; None if that is unknown.

    Raises:
        NoSpaceError: with all sizes.
    """
    space = target.space()
    if space is None:
        return None
    kept_bytes = min_free.of(space.total_bytes)
    spare_bytes = space.free_bytes - needed_bytes - kept_bytes
    if spare_bytes >= 0:
        return spare_bytes
    needs = f"needs {human_bytes(needed_bytes)}, and there is too little free space" if needed_bytes else "has too little free space"
    keeps = f", and {human_bytes(kept_bytes)} must stay free ({min_free})" if kept_bytes else ""
    free = f"`{shlex.join(['tsck', 'usage', '-s', target.url])}` shows what gc can free now, and what later"
    lower = ", or pass a smaller min_free= to tsck.open(...)" if kept_bytes else ""
    advice = f"free space there ({free}), or use another location{lower}"
    raise NoSpaceError(
        f"{what} {needs} at {target.url}: {human_bytes(space.free_bytes)} of {human_bytes(space.total_bytes)} are free{keeps}; {advice}",
        object_id=target.url,
    )


def mount_point(path: str) -> str:
    """The mount point of the disk that `path` is on, or will be on."""
    folder = os.path.abspath(path)
    while not os.path.ismount(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    return folder


def disk_of(path: str) -> str:
    """The disk that `path` is on and how full it is: ``the disk at /data has 0 B of 24.0 MiB free``; empty if that cannot be found out."""
    folder = mount_point(path)
    try:
        status = os.statvfs(folder)
    except OSError:
        return ""
    free, total = status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize
    inodes = f", and {status.f_favail:,} of {status.f_files:,} inodes" if status.f_files and status.f_favail < _FEW_INODES else ""
    return f"the disk at {folder} has {human_bytes(free)} of {human_bytes(total)} free{inodes}"


@contextmanager
def writing_to(path: str, what: str) -> Iterator[None]:
    """Turns an `OSError` inside into an error of the folder `path`; `what` begins the message.

    Raises:
        PermissionDeniedError: this user may not write there.
        NoSpaceError: no file fits there.
        InvalidOptionError: not a usable folder.
    """
    try:
        yield
    except OSError as exc:
        text = f"{what} {path} cannot be written to: {os.strerror(exc.errno or errno.EIO)}"
        if exc.errno in _NO_SPACE:
            disk = disk_of(path)
            raise NoSpaceError(f"{text}{disk and f' ({disk})'}; free space there, or name another folder", object_id=path) from exc
        if exc.errno in _DENIED:
            raise PermissionDeniedError(f"{text}; check its owner and mode, or name another folder", object_id=path) from exc
        raise InvalidOptionError(f"{text}; name a folder, or a path where one can be made", object_id=path) from exc

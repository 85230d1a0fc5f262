"""Is there room, and may it be written: asked before anything is written, so that nothing is half there when a disk is full.

Pure: a place says its own `Space`. It knows no backend, no format and no clock. A place that cannot
tell what is free, such as an object store, passes; what a filesystem hides (a user's quota) shows only when a write fails.
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
_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS}


class Space(NamedTuple):
    """How large a place is."""

    free_bytes: int
    """What this user can still write."""
    total_bytes: int


class HasSpace(Protocol):
    """Something that can be written to, such as a backend."""

    url: str

    def space(self) -> Space | None:
        """How large it is, where it can tell."""


@dataclass(frozen=True, slots=True)
class MinFree:
    """What must stay free: a part of the place, or a number of bytes."""

    fraction: float = 0.0
    size_bytes: int = 0

    @classmethod
    def parse(cls, value: object) -> Self:
        """From ``"5%"``, ``"50GB"``, a number of bytes, or 0 for nothing.

        Raises:
            InvalidOptionError: it is none of these.
        """
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
        """The bytes that must stay free of so many."""
        return self.size_bytes + int(self.fraction * total_bytes)


def require_free_space(place: HasSpace, min_free: MinFree, needed_bytes: int, what: str) -> None:
    """Refuses what would leave less than `min_free` of a place; `what` it is begins the message.

    Raises:
        NoSpaceError: with all sizes.
    """
    space = place.space()
    if space is None:
        return
    kept_bytes = min_free.of(space.total_bytes)
    if space.free_bytes - needed_bytes >= kept_bytes:
        return
    needs = f"needs {human_bytes(needed_bytes)} and has no room" if needed_bytes else "has no room"
    keeps = f", and {human_bytes(kept_bytes)} must stay free ({_shown(min_free)})" if kept_bytes else ""
    free = f"`{shlex.join(['tsck', 'usage', '-s', place.url])}` says what gc can free now, and what later"
    advice = f"free space there ({free}), or use another place" + (", or lower min_free" if kept_bytes else "")
    raise NoSpaceError(
        f"{what} {needs} at {place.url}: {human_bytes(space.free_bytes)} of {human_bytes(space.total_bytes)} are free{keeps}; {advice}",
        object_id=place.url,
    )


@contextmanager
def writing_to(path: str, what: str) -> Iterator[None]:
    """Says of an `OSError` inside that the folder `path` cannot be used; `what` it is begins the message.

    Raises:
        PermissionDeniedError: this user may not write there.
        NoSpaceError: no file fits there.
        InvalidOptionError: it is no folder that can be used.
    """
    try:
        yield
    except OSError as exc:
        text = f"{what} {path} cannot be written to: {os.strerror(exc.errno or errno.EIO)}"
        if exc.errno in _NO_SPACE:
            raise NoSpaceError(f"{text}; free space there, or name another folder", object_id=path) from exc
        if exc.errno in _DENIED:
            raise PermissionDeniedError(f"{text}; check its owner and mode, or name another folder", object_id=path) from exc
        raise InvalidOptionError(f"{text}; name a folder, or a path where one can be made", object_id=path) from exc


def _shown(min_free: MinFree) -> str:
    return f"min_free={min_free.fraction * 100:g}%" if min_free.fraction else f"min_free={human_bytes(min_free.size_bytes)}"

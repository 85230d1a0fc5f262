"""The reserve of a store in a folder: space that log entries which free space can use when the disk is full.

It is a few objects without meaning, each of which is deleted when such an entry does not fit (`within_reserve`), and written again when
there is space (`fill_reserve`). Saves never use it. Builds that do not know it ignore it, and it may be missing.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

from blake3 import blake3

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.errors import NoSpaceError, StoreError

T = TypeVar("T")

STEP_BYTES: Final = 1 << 20
"""The size of each object of the reserve. No log entry is larger."""
NAMES: Final = tuple(f"gc/reserve-{number}" for number in range(4))
"""Builds that do not know the reserve ignore this folder."""


def fill_reserve(backend: Backend) -> None:
    """Writes the missing objects of the reserve, if `backend` is a folder and space for one more stays free. Never fails."""
    data = b""
    with suppress(StoreError):  # the space is needed elsewhere, or this user may not write: the next run of gc tries again
        if not backend.is_local or backend.space() is None:
            return
        sizes = {info.name: info.size_bytes for info in backend.list("gc/")}
        for name in NAMES:
            space = backend.space()
            if sizes.get(name) == STEP_BYTES or space is None or space.free_bytes < 2 * STEP_BYTES:
                continue
            data = data or blake3(os.urandom(32)).digest(STEP_BYTES)  # a filesystem that compresses would store zeros in no space
            if name in sizes:
                backend.delete([name])  # a crash, or the full disk, tore it
            backend.create(name, data)


def has_reserve(backend: Backend) -> bool:
    """Whether an object of the reserve is left."""
    return any(info.name in NAMES for info in backend.list("gc/"))


def within_reserve(backend: Backend, write: Callable[[], T]) -> T:
    """What `write` returns; while there is no space for it, deletes a step of the reserve and calls it again.

    Raises:
        NoSpaceError: there is no space, and nothing is left of the reserve.
    """
    for name in NAMES:
        try:
            return write()
        except NoSpaceError:
            with suppress(StoreError):
                backend.delete([name])
    return write()

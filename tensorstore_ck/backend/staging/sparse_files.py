"""Copies of objects that the store has: sparse files, whose holes are the ranges not fetched yet.

A cache: losing it loses nothing, so nothing is synced, and readers must verify the bytes. Ranges are kept in whole grains, since a
filesystem's holes are no finer than its blocks; where the filesystem does not report holes, ranges are not kept. A file has its object's
size from the moment it holds data. Knows neither the store nor the capacity of the folder.
"""

import functools
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_io import read_at, read_whole, write_at
from tensorstore_ck.backend.object_names import check_name
from tensorstore_ck.common.buffers import Buffer, byte_views
from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder

GRAIN_BYTES: Final = 64 << 10
"""A multiple of all usual page and block sizes: some machines have pages of 64 KiB."""

_BELOW: Final = "copies"
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEEP: Final = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class FileUse(NamedTuple):
    """A file, and how much of the disk it uses."""

    modified_ns: int
    used_bytes: int
    path: str


class SparseFileCache:
    """Objects as files below ``copies/`` of `folder`. Raises the filesystem's errors as `OSError` or `StoreError`."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._whole = LocalBackend(_BELOW, sync=False, within=folder)

    def path(self, name: str) -> str:
        """The path of an object's copy, below the folder."""
        return f"{_BELOW}/{check_name(name)}"

    def get(self, name: str) -> bytes | None:
        """The whole object; None if part of it is missing."""
        fd = self._open(name)
        if fd is None:
            return None
        with closing_fd(fd):
            size = os.fstat(fd).st_size
            return read_whole(fd, size) if _is_data(fd, 0, size) else None

    def read_into(self, name: str, offset: int, target: memoryview) -> bool:
        """Fills `target` if the whole range is there."""
        fd = self._open(name)
        if fd is None:
            return False
        with closing_fd(fd):
            return _is_data(fd, offset, len(target)) and read_at(fd, target, offset) == len(target)

    def size(self, name: str) -> int:
        """The size of the object, parts of which may be missing; 0 without a copy."""
        try:
            return os.stat(self.path(name), dir_fd=self._folder.fd(), follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            return 0

    def keep(self, name: str, data: Buffer) -> None:
        """Keeps a whole object."""
        self._whole.replace(name, data)

    def keep_range(self, name: str, size_bytes: int, offset: int, data: memoryview) -> None:
        """Keeps a range, in whole grains, of an object of that size."""
        path = self.path(name)
        self._folder.make_folders(os.path.dirname(path))
        with closing_fd(os.open(path, _KEEP, FILE_MODE, dir_fd=self._folder.fd())) as fd:
            if os.fstat(fd).st_size != size_bytes:
                os.ftruncate(fd, 0)  # a new file, or not a copy of this object
                os.ftruncate(fd, size_bytes)
            write_at(fd, byte_views([data]), offset)

    @functools.cached_property
    def keeps_ranges(self) -> bool:
        """Whether the filesystem reports holes exactly: tested once."""
        with closing_fd(self._folder.open_nameless(_BELOW)) as fd:
            os.ftruncate(fd, 8 * GRAIN_BYTES)
            write_at(fd, [memoryview(bytes(GRAIN_BYTES))], 2 * GRAIN_BYTES)
            return _is_data(fd, 2 * GRAIN_BYTES, GRAIN_BYTES) and not any(_is_data(fd, at * GRAIN_BYTES, 1) for at in (0, 1, 3, 7))

    def drop(self, name: str) -> bool:
        """Deletes a copy; returns whether there was one."""
        try:
            os.unlink(self.path(name), dir_fd=self._folder.fd())
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def files(self) -> Iterator[FileUse]:
        """Every file, with leftovers of interrupted processes."""
        return files_below(self._folder, _BELOW)

    def _open(self, name: str) -> int | None:
        try:
            return os.open(self.path(name), _READ, dir_fd=self._folder.fd())
        except (FileNotFoundError, NotADirectoryError):
            return None


def files_below(folder: PrivateFolder, below: str) -> Iterator[FileUse]:
    """Every file there; those deleted meanwhile are left out."""
    return (FileUse(status.st_mtime_ns, status.st_blocks * 512, path) for path, status in folder.files(below))


def _is_data(fd: int, offset: int, size: int) -> bool:
    try:
        return os.lseek(fd, offset, os.SEEK_HOLE) >= offset + size
    except OSError:
        return False  # past the end

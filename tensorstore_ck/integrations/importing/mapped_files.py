"""Foreign files, checked and mapped into memory: tensor bytes are read only when needed, and never copied.

Only regular files. A file that a folder's own files name must lie in that folder: no absolute names, no ``..``, no links that lead out.
Knows no format. A file stays mapped until its `Files` is closed and no tensor uses it.
"""

import ctypes
import mmap
import os
import stat
from contextlib import suppress
from typing import Any, Final, Self

import numpy as np
import torch

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.errors import CorruptObjectError, InvalidNameError, NotFoundError, UnsupportedValueError
from tensorstore_ck.integrations.importing.crc_check import ExpectedCrc
from tensorstore_ck.integrations.importing.malformed import printable
from tensorstore_ck.state.byte_sources import address_of

MAX_NAME: Final = 4096


class MappedFile:
    """A file in memory, read-only."""

    def __init__(self, path: str, descriptor: int, size: int) -> None:
        self.path = path
        self.size = size
        self._map = mmap.mmap(descriptor, size, mmap.MAP_PRIVATE, mmap.PROT_READ) if size else None
        self.data = memoryview(self._map) if self._map is not None else memoryview(b"")
        self._array = np.frombuffer(self.data, np.uint8)
        """Keeps the file mapped."""
        self.address = address_of(self._array)

    def storage(self, start: int, size: int) -> torch.UntypedStorage:
        """The read-only memory of bytes [start, start + size). Keeps the file mapped."""
        if not size:
            return torch.empty(0, dtype=torch.uint8).untyped_storage()
        memory: Any = (ctypes.c_ubyte * size).from_address(self.address + start)  # torch warns about a read-only buffer
        memory.owner = self._array  # pytest, for example, prints tensors of an error's frames after the import
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()


class Files:
    """All files of one import. A context manager: its tensors must not be used afterwards."""

    def __init__(self) -> None:
        self._open: dict[str, MappedFile] = {}
        self.expected: list[ExpectedCrc] = []
        """CRC-32s of bytes in them: see `crc_check`."""
        self.newest_ns = 0
        """When the newest of them was written."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()

    def map(self, path: str) -> MappedFile:
        """The file at a path; the same one for the same path.

        Raises `NotFoundError` if it does not exist, `UnsupportedValueError` if it is no regular file.
        """
        if path not in self._open:
            with os_errors("read", path):
                try:
                    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                except FileNotFoundError as exc:
                    raise NotFoundError(f"there is no file {path}: give the path of a checkpoint", object_id=path) from exc
                try:
                    status = os.fstat(descriptor)
                    if not stat.S_ISREG(status.st_mode):
                        raise UnsupportedValueError(
                            f"{path} is no regular file, so it cannot be a checkpoint: copy it to one", object_id=path
                        )
                    self.newest_ns = max(self.newest_ns, status.st_mtime_ns)
                    self._open[path] = MappedFile(path, descriptor, status.st_size)
                finally:
                    os.close(descriptor)
        return self._open[path]

    def drop(self, file: MappedFile) -> None:
        """Closes an unused file: a process can map only some ten thousands."""
        self._open.pop(file.path, None)

    def expect(self, file: MappedFile, start: int, size: int, checksum: int) -> None:
        """Adds the CRC-32 that bytes of a file must have."""
        self.expected.append(ExpectedCrc(address=file.address + start, size=size, checksum=checksum, path=file.path, start=start))


class Folder:
    """A folder whose files may name other files in it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._root = os.path.realpath(path)
        self._blobs: str | None = None
        if os.path.basename(os.path.dirname(self._root)) == "snapshots":  # the Hugging Face cache: links into its ../../blobs
            self._blobs = os.path.join(os.path.dirname(os.path.dirname(self._root)), "blobs")

    def names(self) -> list[str]:
        """Its entries, sorted."""
        with os_errors("list", self.path):
            return sorted(os.listdir(self.path))

    def has(self, name: str) -> bool:
        """Whether there is a file of that name directly in it."""
        return os.path.isfile(os.path.join(self.path, name))

    def find(self, name: object) -> str | None:
        """The path of a file in it that a foreign file names; None: there is none. Raises `InvalidNameError` if the name leads outside."""
        shown = printable(name)
        if type(name) is not str or not 0 < len(name) <= MAX_NAME or "\0" in name or os.path.isabs(name) or ".." in name.split("/"):
            raise InvalidNameError(
                f"{self.path} names {shown!r}, which is no file within it: do not trust this checkpoint", object_id=shown
            )
        path = os.path.join(self.path, name)
        real = self._root
        with suppress(OSError, ValueError):
            real = os.path.realpath(path, strict=True)
        if real == self._root:
            return None
        if not any(real.startswith(root + os.sep) for root in (self._root, self._blobs) if root is not None):
            raise InvalidNameError(
                f"{path} is a link that leads out of its folder, to {printable(real)}: copy the checkpoint with `cp -rL` if you trust it",
                object_id=shown,
            )
        return real

    def join(self, name: object) -> str:
        """The path of a file in it that a foreign file names.

        Raises `InvalidNameError` if the name leads out of the folder, `CorruptObjectError` if there is no such file.
        """
        path = self.find(name)
        if path is None:
            shown = printable(name)
            raise CorruptObjectError(f"{self.path} names {shown!r}, which does not exist: get the whole checkpoint", object_id=shown)
        return path

"""The backend of a staged save: its writes go to the folder, from where they are uploaded; everything else to the store.

Reads go through `ask`, which raises if the store takes too long: a save is staged without it then.
"""
# ruff: noqa: D102 - protocol.py documents the methods

from collections.abc import Callable
from typing import Any

from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.common.buffers import Buffer


class StagingWriteBackend:
    """A `Backend`. All other attributes are those of `backend`, the store read through the folder."""

    is_local = True

    def __init__(self, folder: StagingFolder, backend: Backend, ask: Callable[[Callable[[], Any]], Any] = lambda call: call()) -> None:
        self._folder = folder
        self._ask = ask
        self._backend = backend
        self.names: list[str] = []
        """The written objects."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data: bytes = self._ask(lambda: self._backend.get(name, max_bytes=max_bytes))
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        target[:] = self._ask(lambda: self._read(name, offset, target.nbytes))

    def size(self, name: str) -> int:
        size_bytes: int = self._ask(lambda: self._backend.size(name))
        return size_bytes

    def _read(self, name: str, offset: int, size_bytes: int) -> bytearray:
        """Into memory of its own: a read that comes too late must not change the target."""
        data = bytearray(size_bytes)
        self._backend.read_into(name, offset, memoryview(data))
        return data

    def put(self, name: str, data: Buffer) -> None:
        """Writes a small object."""
        self.names.append(name)
        self._folder.unsent.put(name, data)

    def open_writer(self, name: str) -> ObjectWriter:
        """Begins a large object."""
        self.names.append(name)
        return self._folder.unsent.open_writer(name)

"""The backend of a staged save: its writes go to the folder, from where they are uploaded; everything else to the store.

Reads go through `ask`, which raises if the store takes too long: a save is staged without it then.
"""
# ruff: noqa: D102 - protocol.py documents the methods

from collections.abc import Callable
from typing import Protocol, TypeVar

from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.protocol import Backend, ObjectWriter
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.common.buffers import Buffer

T = TypeVar("T")


class Ask(Protocol):
    """How the store is asked."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """The result of `call`, in time."""


class StagingWriteBackend(ForwardingBackend):
    """See above."""

    def __init__(self, folder: StagingFolder, inner: Backend, ask: Ask) -> None:
        """`inner`: the store, read through the folder."""
        super().__init__(inner)
        self.is_local = True
        self._folder = folder
        self._ask = ask
        self.names: list[str] = []
        """The written objects."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        return self._ask(lambda: self.inner.get(name, max_bytes=max_bytes))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        target[:] = self._ask(lambda: self._read(name, offset, target.nbytes))

    def size(self, name: str) -> int:
        return self._ask(lambda: self.inner.size(name))

    def _read(self, name: str, offset: int, size_bytes: int) -> bytearray:
        """Into memory of its own: a read that comes too late must not change the target."""
        data = bytearray(size_bytes)
        self.inner.read_into(name, offset, memoryview(data))
        return data

    def put(self, name: str, data: Buffer) -> None:
        self.names.append(name)
        self._folder.unsent.put(name, data)

    def open_writer(self, name: str) -> ObjectWriter:
        self.names.append(name)
        return self._folder.unsent.open_writer(name)

"""The base of all backends that wrap another one: it passes every call on, and a wrapper overrides what it changes."""
# ruff: noqa: D102 - protocol.py documents the methods

from collections.abc import Collection, Iterable, Iterator

from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.free_space import Space


class ForwardingBackend(Backend):
    """Passes every call on to `inner`; but `get_if_there` calls `get`, so that a wrapper overrides that one alone."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.url = inner.url
        self.is_local = inner.is_local

    def get(self, name: str, *, max_bytes: int) -> bytes:
        return self.inner.get(name, max_bytes=max_bytes)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self.inner.read_into(name, offset, target)

    def size(self, name: str) -> int:
        return self.inner.size(name)

    def put(self, name: str, data: Buffer) -> None:
        self.inner.put(name, data)

    def replace(self, name: str, data: Buffer) -> None:
        self.inner.replace(name, data)

    def create(self, name: str, data: Buffer) -> Created:
        return self.inner.create(name, data)

    def sync_folders(self, name: str) -> None:
        self.inner.sync_folders(name)

    def open_writer(self, name: str) -> ObjectWriter:
        return self.inner.open_writer(name)

    def open_whole_writer(self, name: str) -> ObjectWriter:
        return self.inner.open_whole_writer(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix)

    def folders(self, start: str) -> Collection[str]:
        return self.inner.folders(start)

    def delete(self, names: Iterable[str]) -> None:
        self.inner.delete(names)

    def space(self) -> Space | None:
        return self.inner.space()

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        return self.inner.list_uploads(folders)

    def abort_upload(self, name: str) -> None:
        self.inner.abort_upload(name)

    def close(self) -> None:
        self.inner.close()

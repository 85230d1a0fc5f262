"""A backend around another one that fails, dies, tears or loses the reply at its k-th call."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.errors import BackendUnavailableError, NoSpaceError


class Death(BaseException):
    """The process is gone: nothing after this runs in it."""


MODES = ("unavailable", "no-space", "die-before", "die-after", "tear", "lost-reply", "unknown", "unknown-lands-later")


class Faults:
    """Counts calls, and strikes at number `at` (from 1)."""

    def __init__(self, mode: str = "", at: int = 0, *, persistent: bool = False) -> None:
        self.mode = mode
        self.at = at
        self.persistent = persistent
        self.calls = 0
        self.dead = False
        self.struck = ""
        self.later: Callable[[], object] | None = None

    def call(self, what: str, effect: Callable[[], Any], tear: Callable[[], object] | None = None, *, create: bool = False) -> Any:
        if self.dead:
            raise Death
        if self.later is not None:
            self.later()
            self.later = None
        self.calls += 1
        hit = self.calls == self.at or (self.persistent and self.at and self.calls > self.at)
        if not hit:
            return effect()
        self.struck = self.struck or what
        match self.mode:
            case "unavailable":
                raise BackendUnavailableError(f"injected: {what}")
            case "no-space":
                raise NoSpaceError(f"injected: {what}")
            case "die-before":
                self.dead = True
                raise Death
            case "die-after":
                effect()
                self.dead = True
                raise Death
            case "tear":
                if tear is not None:
                    tear()
                self.dead = True
                raise Death
            case "lost-reply":
                effect()
                if create:
                    return Created.UNKNOWN
                raise BackendUnavailableError(f"injected: {what}, reply lost")
            case "unknown":
                if create:
                    return Created.UNKNOWN
            case "unknown-lands-later":
                if create:
                    self.later = effect
                    return Created.UNKNOWN
        return effect()


class FaultyWriter:
    def __init__(self, inner: ObjectWriter, faults: Faults) -> None:
        self._inner = inner
        self._faults = faults

    def append(self, data: Sequence[Buffer]) -> int:
        half = [bytes(data[0])[: len(data[0]) // 2]]
        offset: int = self._faults.call("append", lambda: self._inner.append(data), lambda: self._inner.append(half))
        return offset

    def close(self) -> None:
        self._faults.call("close", self._inner.close)

    def abort(self) -> None:
        if not self._faults.dead:
            self._inner.abort()


class FaultyBackend(Backend):
    def __init__(self, inner: Backend, faults: Faults, *, atomic_put: bool) -> None:
        self._inner = inner
        self._faults = faults
        self._atomic_put = atomic_put
        self.url = inner.url
        self.is_local = inner.is_local

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data: bytes = self._faults.call(f"get {name}", lambda: self._inner.get(name, max_bytes=max_bytes))
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._faults.call(f"read {name}", lambda: self._inner.read_into(name, offset, target))

    def size(self, name: str) -> int:
        size: int = self._faults.call(f"size {name}", lambda: self._inner.size(name))
        return size

    def put(self, name: str, data: Buffer) -> None:
        tear = None if self._atomic_put else lambda: self._inner.put(name, bytes(data)[: len(data) // 2])
        self._faults.call(f"put {name}", lambda: self._inner.put(name, data), tear)

    def replace(self, name: str, data: Buffer) -> None:
        self._faults.call(f"replace {name}", lambda: self._inner.replace(name, data))

    def create(self, name: str, data: Buffer) -> Created:
        created: Created = self._faults.call(f"create {name}", lambda: self._inner.create(name, data), create=True)
        return created

    def sync_folders(self, name: str) -> None:
        self._faults.call(f"sync {name}", lambda: self._inner.sync_folders(name))

    def open_writer(self, name: str) -> ObjectWriter:
        writer: ObjectWriter = self._faults.call(f"open {name}", lambda: self._inner.open_writer(name))
        return FaultyWriter(writer, self._faults)

    def open_whole_writer(self, name: str) -> ObjectWriter:
        writer: ObjectWriter = self._faults.call(f"open {name}", lambda: self._inner.open_whole_writer(name))
        return FaultyWriter(writer, self._faults)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        found: Iterator[ObjectInfo] = self._faults.call(f"list {prefix}", lambda: iter(tuple(self._inner.list(prefix))))
        return found

    def delete(self, names: Iterable[str]) -> None:
        self._faults.call("delete", lambda: self._inner.delete(names))

    def space(self) -> Space | None:
        return self._inner.space()

    def folders(self, start: str) -> Collection[str]:
        found: Collection[str] = self._faults.call(f"folders {start}", lambda: self._inner.folders(start))
        return found

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        return self._inner.list_uploads(folders)

    def abort_upload(self, name: str) -> None:
        self._inner.abort_upload(name)

    def close(self) -> None:
        self._inner.close()

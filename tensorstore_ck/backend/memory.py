"""A backend in a dict: for tests, and the model with which the others are compared.

One lock guards the dict, so that `create` is atomic. Objects live as long as the backend.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import itertools
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence

from tensorstore_ck.backend.object_names import check_name, check_prefix, is_in
from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.common.ids import Clock
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, MissingObjectError


class MemoryBackend(Backend):
    """Objects in this process's memory; not shared with any other `MemoryBackend`."""

    url = "memory:"
    is_local = True

    def __init__(self, *, clock: Clock = time.time_ns) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, int]] = {}
        self._uploads: dict[str, int] = {}
        self._upload_numbers = itertools.count()

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data = self._data(name)
        if len(data) > max_bytes:
            raise CorruptObjectError(f"{name} has {len(data)} bytes, more than the {max_bytes} it may have", object_id=name)
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        data = self._data(name)
        if offset + len(target) > len(data):
            raise CorruptObjectError(f"{name} ends at {len(data)}, before byte {offset + len(target)}", object_id=name)
        target[:] = memoryview(data)[offset : offset + len(target)]

    def size(self, name: str) -> int:
        return len(self._data(name))

    def put(self, name: str, data: Buffer) -> None:
        self._insert_new(name, data)

    def replace(self, name: str, data: Buffer) -> None:
        with self._lock:
            self._objects[check_name(name)] = bytes(data), self._clock()

    def create(self, name: str, data: Buffer) -> Created:
        return Created.CREATED if self._insert(name, data) else Created.EXISTS

    def sync_folders(self, name: str) -> None:
        check_name(name)

    def open_writer(self, name: str) -> ObjectWriter:
        return _MemoryWriter(self, check_name(name))

    def open_whole_writer(self, name: str) -> ObjectWriter:
        return self.open_writer(name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        with self._lock:
            objects = list(self._objects.items())
        yield from [ObjectInfo(name, len(data), at, at) for name, (data, at) in objects if name.startswith(prefix)]

    def folders(self, start: str) -> Collection[str]:
        with self._lock:
            names = list(self._objects)
        return {name.partition("/")[0] for name in names if "/" in name and name.startswith(start)}

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with self._lock:
                self._objects.pop(check_name(name), None)

    def space(self) -> Space | None:
        return None

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        with self._lock:
            found = [ObjectInfo(upload, 0, at) for upload, at in self._uploads.items()]
        return (info for info in found if is_in(folders, info.name))

    def abort_upload(self, name: str) -> None:
        with self._lock:
            self._uploads.pop(name, None)

    def close(self) -> None:
        """Nothing to release; the objects stay."""

    def _data(self, name: str) -> bytes:
        with self._lock:
            stored = self._objects.get(check_name(name))
        if stored is None:
            raise MissingObjectError(f"{name} is not in the store", object_id=name)
        return stored[0]

    def _insert(self, name: str, data: Buffer) -> bool:
        stored = bytes(data), self._clock()
        with self._lock:
            return self._objects.setdefault(check_name(name), stored) is stored

    def _insert_new(self, name: str, data: Buffer) -> None:
        if not self._insert(name, data):
            raise BackendUnavailableError(f"{name} exists, though its name was new; try again", object_id=name)

    def _begin_upload(self, name: str) -> str:
        with self._lock:
            upload = f"{name}?upload={next(self._upload_numbers)}"
            self._uploads[upload] = self._clock()
        return upload


class _MemoryWriter:
    """Like a multipart upload: invisible until `close`, and listed as an upload until then."""

    def __init__(self, backend: MemoryBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._upload = backend._begin_upload(name)
        self._lock = threading.Lock()
        self._data = bytearray()

    def append(self, data: Sequence[Buffer]) -> int:
        with self._lock:
            offset = len(self._data)
            for piece in data:
                self._data += piece
        return offset

    def close(self) -> None:
        self._backend._insert_new(self._name, self._data)
        self._backend.abort_upload(self._upload)

    def abort(self) -> None:
        self._data.clear()
        self._backend.abort_upload(self._upload)

"""Any other fsspec filesystem: ``memory://``, Google Cloud Storage, Azure.

Knows fsspec's interface, no format. fsspec has no atomic create (its default is exists-then-write), so a backend gets a `CreateCall`
that is known to be atomic for its protocol; without one, `create` raises. The libraries have no time limit, or one for a part of a
request, so every call has one here.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, TypeVar

from fsspec.implementations.memory import MemoryFile

from tensorstore_ck.backend.object_names import check_name, check_prefix
from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.backend.remote_errors import ProcessLocal, remote_errors
from tensorstore_ck.backend.wait_notices import WaitNotices
from tensorstore_ck.common.buffers import Buffer, byte_views
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.common.threads import within_seconds
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, MissingObjectError, UnsafeBackendError
from tensorstore_ck.events import Callback, log_event

T = TypeVar("T")

PATIENCE_SECONDS: Final = 60.0
"""How long a server may take to answer a call, with the library's own retries; more for the call's bytes."""
SLOWEST_BYTES_PER_SECOND: Final = 128 << 10
LISTING_PATIENCE: Final = 10
"""A listing may take this many times as long: one call reads all its pages."""
PIECE_BYTES: Final = 8 << 20
"""How much of an object of unknown size one call reads."""

CreateCall = Callable[[Any, str, bytes], None]
"""(filesystem, path, bytes): makes the object, or raises FileExistsError, atomically."""


def create_in_memory(filesystem: Any, path: str, data: bytes) -> None:
    """Creates in fsspec's memory filesystem, which is a dict: `setdefault` is atomic."""
    path = filesystem._strip_protocol(path)
    file = MemoryFile(filesystem, path, data)
    if filesystem.store.setdefault(path, file) is not file:
        raise FileExistsError(path)


def create_on_server(filesystem: Any, path: str, data: bytes) -> None:
    """Creates with gcsfs (generation 0) and adlfs (If-None-Match), whose servers check the condition."""
    filesystem.pipe_file(path, data, mode="create")


_TIMES: Final = ("LastModified", "last_modified", "mtime", "updated", "created")
_SERVER_TIMES: Final = ("LastModified", "last_modified", "updated", "created")
"""The fields of `_TIMES` that a server sets, and no writer can set."""
CREATE_CALLS: Final[Mapping[str, CreateCall]] = {
    "memory": create_in_memory,
    **dict.fromkeys(("gs", "gcs", "az", "abfs", "abfss"), create_on_server),
}


class FsspecBackend(Backend):
    """Objects below the path `root` of a filesystem that `connect` makes, once per process."""

    is_local = False

    def __init__(
        self,
        connect: Callable[[], Any],
        root: str,
        url: str,
        create_call: CreateCall | None,
        *,
        secrets: Sequence[str] = (),
        patience_seconds: float | None = PATIENCE_SECONDS,
        on_wait: Callback = log_event,
    ) -> None:
        """`secrets`: what messages must not show. `patience_seconds`: see `PATIENCE_SECONDS`; None if it cannot hang. `on_wait` is called
        with an event of the kind ``waiting`` when a call has waited long.
        """
        self.url = url
        self.secrets = secrets
        self._filesystem = ProcessLocal(connect)
        self._root = root.rstrip("/")
        self._create_call = create_call
        self._patience_seconds = patience_seconds
        self._notices = WaitNotices(on_wait)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        path = self._path(name)
        data = b""
        while len(data) <= max_bytes:
            end = min(len(data) + PIECE_BYTES, max_bytes + 1)
            try:
                piece = self._cat(name, path, len(data), end)
            except CorruptObjectError:
                return data  # no byte there: the object ends
            data = data + piece if data else piece
            if len(data) < end:
                return data
        raise CorruptObjectError(f"{name} has more than the {max_bytes} bytes it may have", object_id=name)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        end = offset + len(target)
        path = self._path(name)
        data = self._cat(name, path, offset, end) if len(target) else b""
        if len(data) != len(target):
            raise CorruptObjectError(f"{name} ends at {offset + len(data)}, before byte {end}", object_id=name)
        target[:] = data

    def size(self, name: str) -> int:
        path = self._path(name)

        def look(filesystem: Any) -> int:
            info = filesystem.info(path)
            if info["type"] != "file":
                raise FileNotFoundError(f"{name} is a folder")
            return int(info["size"])

        return self.ask("look at", name, look)

    def put(self, name: str, data: Buffer) -> None:
        if self._create_call is None:
            self.replace(name, data)
            return
        try:
            self._create(name, self._create_call, data)
        except BackendUnavailableError as exc:
            # The libraries repeat a request whose reply was lost, and then find the object that they made. It is small: no pack.
            is_there = isinstance(exc.__cause__, FileExistsError) and self.size(name) == len(data)
            if not is_there or self.get(name, max_bytes=len(data)) != data:
                raise

    def replace(self, name: str, data: Buffer) -> None:
        path, content = self._path(name), bytes(data)
        self.ask("write", name, lambda filesystem: filesystem.pipe_file(path, content), len(content))

    def create(self, name: str, data: Buffer) -> Created:
        if self._create_call is None:
            raise UnsafeBackendError(
                f"no atomic create-if-absent is known for {self.url}, so commits cannot be exclusive on it; "
                "keep the store on a local filesystem, S3, Google Cloud Storage or Azure",
                object_id=name,
            )
        try:
            self._create(name, self._create_call, data)
        except BackendUnavailableError as exc:
            return Created.EXISTS if isinstance(exc.__cause__, FileExistsError) else Created.UNKNOWN
        return Created.CREATED

    def _create(self, name: str, create_call: CreateCall, data: Buffer) -> None:
        path, content = self._path(name), bytes(data)
        self.ask("create", name, lambda filesystem: create_call(filesystem, path, content), len(content))

    def sync_folders(self, name: str) -> None:
        check_name(name)

    def open_writer(self, name: str) -> ObjectWriter:
        return self._open_writer(name, "wb", deletes=True)

    def open_whole_writer(self, name: str) -> ObjectWriter:
        return self._open_writer(name, "wb" if self._create_call is None else "xb", deletes=False)

    def _open_writer(self, name: str, mode: str, *, deletes: bool) -> ObjectWriter:
        path = self._path(name)
        return _FileWriter(self, name, self.ask("write", name, lambda filesystem: filesystem.open(path, mode)), deletes=deletes)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        folder = f"{self._root}/{check_prefix(prefix)}"

        def find(filesystem: Any) -> tuple[str, Any]:
            try:
                objects = filesystem.find(folder.rstrip("/"), detail=True)
            except FileNotFoundError:
                objects = {}
            return filesystem._strip_protocol(self._root) + "/", objects

        start, objects = self.ask("list", prefix, find, patience=LISTING_PATIENCE)
        if not isinstance(objects, dict):
            return  # adlfs, where an object has the folder's name
        for path, info in objects.items():
            name = path.removeprefix(start)
            if path.startswith(start + prefix):
                yield ObjectInfo(name, int(info["size"]), _time_ns(info, _TIMES), _time_ns(info, _SERVER_TIMES))

    def folders(self, start: str) -> set[str]:
        def find(filesystem: Any) -> Any:
            try:
                return filesystem.ls(self._root, detail=True, refresh=True)
            except FileNotFoundError:
                return ()

        entries = self.ask("list", start, find, patience=LISTING_PATIENCE)
        names = {str(info["name"]).rstrip("/").rpartition("/")[2] for info in entries if info["type"] == "directory"}
        return {name for name in names if name.startswith(start)}

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self._path(name)
            with contextlib.suppress(MissingObjectError):
                self.ask("delete", name, lambda filesystem, path=path: filesystem.rm_file(path))  # type: ignore[misc]

    def space(self) -> Space | None:
        return None

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        """None: these servers remove incomplete uploads themselves, or list them as objects."""
        return iter(())

    def abort_upload(self, name: str) -> None:
        raise CorruptObjectError(f"{name} is not an upload of this store", object_id=name)

    def close(self) -> None:
        self._filesystem.close()

    def _cat(self, name: str, path: str, start: int, end: int) -> bytes:
        data: bytes = self.ask("read", name, lambda filesystem: filesystem.cat_file(path, start=start, end=end), end - start)
        return data

    def ask(self, action: str, name: str, call: Callable[[Any], T], size_bytes: int = 0, *, patience: int = 1) -> T:
        """Returns the filesystem's answer to `call`. The limit is `patience` times the time that a server may take for that many bytes.

        Raises:
            StoreError: `call` failed, or takes longer; it then goes on in the background.
        """
        with remote_errors(action, name, self.url, self.secrets):
            if self._patience_seconds is None:
                return call(self._filesystem.get())
            seconds = patience * self._patience_seconds + size_bytes / SLOWEST_BYTES_PER_SECOND
            try:
                return within_seconds(
                    seconds,
                    lambda: call(self._filesystem.get()),
                    notice_seconds=self._notices.notice_seconds,
                    notice=lambda: self._notices.report(f"{action} {name or 'objects'} in {self.url}", self._notices.notice_seconds),
                )
            except TimeoutError:
                self._filesystem.close()  # other calls must not wait for the connections of those that hang
                raise

    def _path(self, name: str) -> str:
        return f"{self._root}/{check_name(name)}"


class _FileWriter:
    """An fsspec file behind a lock."""

    def __init__(self, backend: FsspecBackend, name: str, file: Any, *, deletes: bool) -> None:
        """`deletes`: whether `abort` may delete the object, since nobody else writes under this name."""
        self._backend = backend
        self._deletes = deletes
        self._name = name
        self._file = file
        self._lock = threading.Lock()
        self._end = 0
        self._failed = False
        self._closed = False

    def append(self, data: Sequence[Buffer]) -> int:
        with self._lock:
            if self._failed:
                raise BackendUnavailableError(f"{self._name} was aborted while it was written", object_id=self._name)
            self._failed = True  # until all of it is written
            offset = self._end
            for view in byte_views(data):
                self._ask(lambda view=view: self._file.write(view), len(view))  # type: ignore[misc]
                self._end += len(view)
            self._failed = False
        return offset

    def close(self) -> None:
        with self._lock:
            if self._failed:
                raise BackendUnavailableError(f"{self._name} could not be written completely; write it again", object_id=self._name)
            self._failed = True
            self._ask(self._file.close)
            self._closed = True

    def _ask(self, call: Callable[[], object], size_bytes: int = 0) -> None:
        """Calls a method of the file, which may send what it has kept of earlier calls."""
        kept_bytes = getattr(self._file, "blocksize", 0)
        self._backend.ask("write", self._name, lambda _: _without_frames(call), size_bytes + kept_bytes)

    def abort(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._failed = True
            with contextlib.suppress(Exception):
                self._ask(self._file.discard)
            with contextlib.suppress(Exception):
                self._file.closed = True  # else adlfs writes it when it is collected, over a later object of that name
            if self._deletes:
                with contextlib.suppress(Exception):
                    self._backend.delete([self._name])


def _without_frames(call: Callable[[], object]) -> None:
    """Calls a method of an fsspec file; an error does not keep the variables of the functions that it came through.

    gcsfs has a view of the file's buffer in one. Python 3.12 crashes when it collects such a view and its `BytesIO` in one cycle, which the
    error is part of.
    """
    before = sys.exception()  # the caller's own
    try:
        call()
    except Exception as exc:
        passed: BaseException | None = exc
        while passed is not None and passed is not before:
            traceback.clear_frames(passed.__traceback__)
            passed = passed.__cause__ or passed.__context__
        raise


def _time_ns(info: Mapping[str, Any], fields: Sequence[str]) -> int:
    """The time in the first existing field of `fields`; 0 without one."""
    for field in fields:
        value = info.get(field)
        if isinstance(value, str):
            value = datetime.fromisoformat(value)
        if isinstance(value, datetime):
            value = value.timestamp()
        if isinstance(value, int | float):
            return int(value * 1_000_000) * 1000
    return 0

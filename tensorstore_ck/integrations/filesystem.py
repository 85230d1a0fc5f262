"""``tsck://``: the snapshots of a store as a read-only fsspec filesystem, whose files are generated when they are read.

    tsck://runs/gpt@1000/model.safetensors::s3://bucket/prefix        fsspec.filesystem("tsck", store="./ckpt")

A snapshot is a folder: ``model.safetensors`` has the tensors of the state's ``model``, under their names there (or all tensors of a state
without a ``model``), ``state.safetensors`` the others under their full names, ``snapshot.json`` everything else. There are also the small
files next to a model's weights (see `model_file_names`), so that `from_pretrained` of transformers loads a copy of the folder. Folders are
refs; other addresses work too but are not listed, so that a copy of a branch's folder has one snapshot: ``ref@step``, ``ref~n``, the first
digits of a root; ``ref@`` lists the steps. An open file keeps its snapshot when the branch moves; separate calls see the current branch, so
use the root from `info` for calls that must agree. Read-only. Does not load torch.
"""

import ctypes
import errno
import io
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple, NoReturn

from fsspec import AbstractFileSystem

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.errors import (
    AmbiguousAddressError,
    InvalidNameError,
    InvalidOptionError,
    InvalidUrlError,
    NotAStoreError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
)
from tensorstore_ck.format.record import decode_metadata, record_name
from tensorstore_ck.integrations.model_file_names import is_model_file
from tensorstore_ck.integrations.virtual_safetensors import FILES, SNAPSHOT, SnapshotFiles, VirtualFile
from tensorstore_ck.log import RefTable, SnapshotRow
from tensorstore_ck.log.address import resolve
from tensorstore_ck.store import ReadOnlyStore, open_store
from tensorstore_ck.store.internals import log_of, open_content, read_record
from tensorstore_ck.store.internals import resolve as resolve_in

MAX_OPEN_SNAPSHOTS: Final = 8
_NEW_BYTES: Final = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(("PyBytes_FromStringAndSize", ctypes.pythonapi))
_ADDRESS_OF_BYTES: Final = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))

Info = dict[str, Any]


class _PathTarget(NamedTuple):
    """The target of a path: a folder, a snapshot, or a file of a snapshot."""

    path: str
    info: SnapshotRow | None
    file: str = ""


class SnapshotFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Reads snapshots of one store. Thread-safe. Raises `OSError`s with this package's messages."""

    protocol = "tsck"
    root_marker = ""

    def __init__(
        self,
        store: str | None = None,
        *,
        fo: str | None = None,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        cache_dir: str | None = None,
        places: Sequence[str] = (),
        trust: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Opens nothing yet.

        Args:
            store: Path or URL of the store.
            fo: The store's URL without its protocol, which fsspec passes for a URL chained after ``::``.
            target_protocol: Its protocol.
            target_options: The store's `storage_options`, such as credentials and endpoint.
            cache_dir: This host's cache of the log; by default in the user's cache directory.
            places: Cold tiers that the store may use: see `tensorstore_ck.open`.
            trust: The file that says which keys must have signed which refs; by default the user's own.
            kwargs: fsspec's own.
        """
        super().__init__(**kwargs)
        if store is None and not fo:
            raise ValueError("which store? Write tsck://ref/model.safetensors::STORE, or give store= (a folder, s3://bucket/prefix, ...)")
        is_path = store is not None or target_protocol in (None, "file", "local")
        self.store = str(store or fo) if is_path else f"{target_protocol}://{fo}"
        self._options, self._cache_dir, self._places, self._trust = dict(target_options or {}), cache_dir, places, trust
        self._opened_store: ReadOnlyStore | None = None
        self._opened: OrderedDict[Ulid, SnapshotFiles] = OrderedDict()
        self._lock = threading.RLock()

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped.strip("/") if isinstance(stripped, str) else stripped

    # --- listing ------------------------------------------------------------------------------------------------------

    def info(self, path: str, **_: Any) -> Info:
        """Name, type and size; for a snapshot and its files also ``root`` and ``step``: one root means the same bytes."""
        with _os_errors(path):
            return self._info(self._target(self._view(), path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Info] | list[str]:
        """The entries of a folder."""
        with _os_errors(path):
            targets = self._list(self._view(), path)
            return [self._info(target) for target in targets] if detail else [target.path for target in targets]

    def created(self, path: str) -> datetime:
        """When the snapshot was saved, by the clock of the host that saved it."""
        with _os_errors(path):
            snapshot = self._target(self._view(), path).info
            if snapshot is None:
                raise NotFoundError(f"{path!r} is a folder of snapshots: see `ls`", object_id=path)
            return datetime.fromtimestamp(snapshot.time_ns / 1e9, UTC)

    modified = created

    def _list(self, view: RefTable, path: str) -> list[_PathTarget]:
        target = self._target(view, path)
        path = target.path
        if target.file:
            return [target]
        if path.endswith("@"):  # not listed in the branch's folder, which would then contain the tensors of all steps
            steps = {move.step: move.ulid for move in view.moves(_base(path), newest_first=False) if move.step is not None}
            return [_PathTarget(f"{path}{step}", view.snapshot(ulid)) for step, ulid in steps.items()]
        below = (name.removeprefix(f"{path}/") for name in _refs(view) if not path or name.startswith(f"{path}/"))
        found: dict[str, _PathTarget] = {}
        for name in (f"{path}/{name.partition('/')[0]}".lstrip("/") for name in below):
            found[name] = _PathTarget(name, resolve(view, name).info if view.branch(name) or view.tag(name) else None)
        for file in self._open_snapshot(target.info).files if target.info is not None else ():
            found.setdefault(f"{path}/{file}", _PathTarget(f"{path}/{file}", target.info, file))
        return list(found.values())

    def _target(self, view: RefTable, path: str) -> _PathTarget:
        """Raises `NotFoundError` if the path does not exist."""
        path = self._strip_protocol(path)
        folder, _, name = path.rpartition("/")
        if view.branch(path) or view.tag(path):
            return _PathTarget(path, self._resolve(view, path))
        if name in FILES and folder:
            info = self._resolve(view, folder)
            if name not in self._open_snapshot(info).files:
                raise NotFoundError(f"{folder!r} has no {name}: see `ls`", object_id=path)
            return _PathTarget(path, info, name)
        if not path or (path.endswith("@") and view.branch(_base(path))) or any(ref.startswith(f"{path}/") for ref in _refs(view)):
            return _PathTarget(path, None)
        if folder and is_model_file(name):
            info = self._resolve(view, folder)
            if name in self._open_snapshot(info).files:
                return _PathTarget(path, info, name)
        return _PathTarget(path, self._resolve(view, path))

    def _info(self, target: _PathTarget) -> Info:
        info: Info = {"name": target.path, "size": 0, "type": "directory"}
        if target.file:
            info |= {"size": self._file(target).size, "type": "file"}
        return info if target.info is None else {**info, "root": target.info.root.hex(), "step": target.info.step}

    # --- reading ------------------------------------------------------------------------------------------------------

    def _open(self, path: str, mode: str = "rb", **_: Any) -> "SnapshotFile":
        if mode != "rb":
            self._refuse(path)
        with _os_errors(path):
            target = self._target(self._view(), path)
            if not target.file:
                raise IsADirectoryError(errno.EISDIR, f"{path!r} is a folder: open a file in it ({', '.join(FILES)})", path)
            return SnapshotFile(target.path, self._file(target))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """The bytes [start, end) of a file; negative positions count from its end."""
        with self._open(path) as file:
            bounds = slice(start, end).indices(file.size)
            file.seek(bounds[0])
            return file.read(max(bounds[1] - bounds[0], 0))

    def _file(self, target: _PathTarget) -> VirtualFile:
        assert target.info is not None
        opened = self._open_snapshot(target.info)
        if target.file not in FILES:
            return opened.model_file(target.file)
        if target.file != SNAPSHOT:
            return opened.tensors(target.file, target.info)
        record = read_record(self._get_store(), target.info)
        return opened.about(target.info, decode_metadata(record, record_name(target.info.ulid)))

    def _open_snapshot(self, info: SnapshotRow) -> SnapshotFiles:
        """Keeps the last few open."""
        with self._lock:
            files = self._opened.pop(info.ulid, None)
        if files is None:
            files = SnapshotFiles(open_content(self._get_store(), info))
        with self._lock:
            self._opened[info.ulid] = files
            if len(self._opened) > MAX_OPEN_SNAPSHOTS:
                self._opened.popitem(last=False)
        return files

    def _view(self) -> RefTable:
        return log_of(self._get_store()).readable_view()

    def _resolve(self, view: RefTable, folder: str) -> SnapshotRow:
        """The snapshot at a folder's address, which may also be written ``ref/@step`` or ``ref/~n``."""
        return resolve_in(self._get_store(), folder.replace("/@", "@").replace("/~", "~"), view).info

    def _get_store(self) -> ReadOnlyStore:
        with self._lock:
            if self._opened_store is None:
                self._opened_store = open_store(
                    self.store,
                    storage_options=self._options,
                    cache_dir=self._cache_dir,
                    read_only=True,
                    places=self._places,
                    trust=self._trust,
                )
            return self._opened_store

    # --- no writing ---------------------------------------------------------------------------------------------------

    def _refuse(self, path: str, *others: Any, **_: Any) -> NoReturn:
        """Stands for every method that would write. Always raises `PermissionError`."""
        named = others[0] if others and isinstance(others[0], str) else path
        raise PermissionError(errno.EROFS, "tsck:// is read-only: save snapshots with store.put_snapshot, or `tsck put`", named)

    mkdir = makedirs = rmdir = rm_file = _rm = rm = cp_file = pipe_file = put_file = touch = _refuse


class SnapshotFile(io.BufferedIOBase):
    """An open file. Reads that continue the previous one come from a window of the file; other reads fetch just their bytes."""

    mode = "rb"

    def __init__(self, path: str, file: VirtualFile) -> None:
        self.path = self.name = path
        self.size = file.size
        self._file = file
        self._position = 0
        self._read_up_to = -1
        self._window = bytearray()
        self._start = self._stop = 0
        """The bytes in the window."""
        self._lock = threading.Lock()

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The position of the next read."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Sets the position of the next read, which may be past the end."""
        position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        if position < 0:
            raise OSError(errno.EINVAL, f"a position before the beginning of {self.path!r}")
        self._position = position
        return position

    def read1(self, size: int = -1, /) -> bytes:
        """Like `read`, but at most a buffer's size."""
        return self.read(size if 0 <= size < io.DEFAULT_BUFFER_SIZE else io.DEFAULT_BUFFER_SIZE)

    def read(self, size: int | None = -1, /) -> bytes:
        """Up to `size` bytes; fewer only at the end."""
        self._check_open()
        left = max(self.size - self._position, 0)
        count = left if size is None or size < 0 else min(size, left)
        with self._lock:
            start = self._position - self._start
            if 0 <= start < start + count <= self._stop - self._start:
                self._position = self._read_up_to = self._position + count
                return bytes(memoryview(self._window)[start : start + count])
        data, memory = _unfilled_bytes(count)
        return data[: self.readinto(memory)]  # all of it, which is no copy, unless another thread moved the position

    def readinto(self, target: Any, /) -> int:
        """Fills `target`, except at the end of the file."""
        self._check_open()
        with self._lock, memoryview(target).cast("B") as view, _os_errors(self.path):
            start = self._position
            stop = min(start + len(view), self.size)
            if start < stop:
                self._fill(start, view[: stop - start])
                self._position = self._read_up_to = stop
            return max(stop - start, 0)

    def _fill(self, start: int, view: memoryview) -> None:
        reads_on, stop = start == self._read_up_to, start + len(view)
        at = start
        if self._start <= at < self._stop:
            at = min(stop, self._stop)
            view[: at - start] = memoryview(self._window)[start - self._start : at - self._start]
        if at < stop and not reads_on:
            self._file.read_into(at, view[at - start :])
            return
        if at < stop and (begun := self._file.window(stop)[0]) > at:  # whole windows go directly into the target
            self._file.read_into(at, view[at - start : begun - start])
            at = begun
        if at < stop:
            self._load(*self._file.window(at))
            view[at - start :] = memoryview(self._window)[at - self._start : stop - self._start]

    def _load(self, start: int, stop: int) -> None:
        self._start = self._stop = 0  # in case the read fails
        if len(self._window) < stop - start:
            self._window = bytearray(stop - start)
        self._file.read_into(start, memoryview(self._window)[: stop - start])
        self._start, self._stop = start, stop

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self.path!r} was closed")


def _refs(view: RefTable) -> list[str]:
    return sorted([*view.branches(), *view.tags()])


def _base(path: str) -> str:
    """The branch whose steps the folder lists."""
    return path.removesuffix("@").removesuffix("/")


def _unfilled_bytes(count: int) -> tuple[bytes, Any]:
    """New bytes, and their memory, which may be filled until somebody else sees them (Python's C API, `PyBytes_FromStringAndSize`).

    A copy would take as long as the read. A BytesIO, whose buffer also needs no copy, crashes Python 3.12 where an error holds views of it.
    """
    data: bytes = _NEW_BYTES(None, count)
    memory = (ctypes.c_char * count).from_address(_ADDRESS_OF_BYTES(data))
    memory.owner = data  # type: ignore[attr-defined]
    return data, memory


@contextmanager
def _os_errors(path: str) -> Iterator[None]:
    """Converts this package's errors into `OSError`s, with the same message."""
    try:
        yield
    except (NotFoundError, InvalidNameError, AmbiguousAddressError, NotAStoreError) as exc:
        raise FileNotFoundError(errno.ENOENT, str(exc), path) from exc
    except PermissionDeniedError as exc:
        raise PermissionError(errno.EACCES, str(exc), path) from exc
    except (InvalidOptionError, InvalidUrlError) as exc:
        raise ValueError(str(exc)) from exc
    except StoreError as exc:
        raise OSError(errno.EIO, str(exc), path) from exc

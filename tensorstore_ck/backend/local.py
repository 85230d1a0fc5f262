"""A folder of a local or network filesystem, by system calls.

Knows no format. Acknowledged writes survive a power failure: the file and its folders are synced before a write returns. A failed fsync is
final (the kernel may drop the dirty pages and report success next time): the file is dropped. Objects with unique names are opened with
O_EXCL, since a torn one is an orphan; `create` and `replace` sync a temporary in the same folder before it gets its name.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import contextlib
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Final

from tensorstore_ck.backend.durable_folders import NEW, TEMPORARY_PREFIX, DurableFolders
from tensorstore_ck.backend.local_io import read_file, read_range, regular_size, try_again, use_direct, wait_for_size, write_at
from tensorstore_ck.backend.local_modes import inherit_from_root, make_as_owner
from tensorstore_ck.backend.local_writer import DirectWriter, LocalWriter
from tensorstore_ck.backend.object_names import NAME, bad_name, check_name, check_prefix
from tensorstore_ck.backend.os_errors import link_failed, os_errors, store_error
from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.common.buffers import Buffer, byte_views
from tensorstore_ck.common.descriptors import NOT_SUPPORTED
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, InvalidUrlError, MissingObjectError

_LINK_TRIES: Final = 8


class LocalBackend(Backend):
    """Objects as files below `root`, which the first write makes.

    `sync=False` skips every fsync: a power failure may then lose or tear acknowledged objects. With `within`, `root` is a path below that
    folder, and everything is reached from its handle.
    """

    is_local = True

    def __init__(self, root: str, *, sync: bool = True, within: PrivateFolder | None = None) -> None:
        self._within = within
        self._root = os.path.abspath(root) if within is None else os.path.normpath(root)
        self.url = self._root if within is None else os.path.normpath(f"{within.path}/{root}")
        if self._root == os.path.dirname(self._root):
            raise InvalidUrlError(f"a store cannot be at {self._root}: give it its own folder", object_id=self._root)
        self._sync = sync
        self._folders = DurableFolders(self._root, within, sync=sync)

    def share_like(self, folder: str) -> None:
        """The root folder, if it is made, gets the mode, group and owner of another store's."""
        self._folders.like = folder

    def make_folders(self, names: Iterable[str]) -> None:
        """Makes folders at the root. They become durable with the first object at the root."""
        for name in names:
            with os_errors("make", name, self.url):
                self._folders.make(f"{self._root}/{check_name(name)}")

    def get(self, name: str, *, max_bytes: int) -> bytes:
        path = self._path(name)
        try:
            return try_again(path, partial(read_file, path, self._at, name=name, max_bytes=max_bytes))
        except OSError as exc:
            raise store_error(exc, "read", name) from exc

    def get_if_there(self, name: str, *, max_bytes: int) -> bytes | None:
        path = self._path(name)
        try:
            return try_again(path, partial(read_file, path, self._at, name=name, max_bytes=max_bytes))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, MissingObjectError):
            return None  # who follows a log asks for its next entry again and again
        except OSError as exc:
            raise store_error(exc, "read", name) from exc

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        path = self._path(name)
        try:  # no context manager: many small blocks are read one by one
            count = try_again(path, read := partial(read_range, path, self._at, offset, target))
            if count < len(target):
                count = wait_for_size(path, read, len(target))
        except OSError as exc:
            raise store_error(exc, "read", name) from exc
        if count < len(target):
            raise CorruptObjectError(f"{name} ends at {offset + count}, before byte {offset + len(target)}", object_id=name)

    def size(self, name: str) -> int:
        path = self._path(name)
        try:
            status = try_again(path, partial(os.stat, path, dir_fd=self._at, follow_symlinks=False))
        except OSError as exc:
            raise store_error(exc, "look at", name) from exc
        return regular_size(status, name)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        return (info for info in self._walk(prefix) if not _is_temporary(info.name))

    def folders(self, start: str) -> set[str]:
        check_name(start)
        return {entry.name for entry in self._entries("") if entry.name.startswith(start) and entry.is_dir(follow_symlinks=False)}

    def space(self) -> Space | None:
        folder = self.url
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        try:
            status = os.statvfs(folder)
        except OSError as exc:
            if exc.errno in NOT_SUPPORTED:
                return None
            raise store_error(exc, "look at the free space of", self.url) from exc
        if not status.f_blocks:
            return None  # some FUSE filesystems answer with zeros
        return Space(status.f_bavail * status.f_frsize, status.f_blocks * status.f_frsize, status.f_favail if status.f_files else None)

    def put(self, name: str, data: Buffer) -> None:
        path = self._path(name)
        try:
            self._write_file(path, data, partial(self._folders.sync_way, os.path.dirname(path)))
        except OSError as exc:
            raise store_error(exc, "write", name, self.url) from exc

    def replace(self, name: str, data: Buffer) -> None:
        with os_errors("write", name, self.url):
            path = self._path(name)
            temporary = self._write_temporary(path, data)
            try:
                os.replace(temporary, path, src_dir_fd=self._at, dst_dir_fd=self._at)
            except OSError:
                self._unlink_quietly(temporary)
                raise
            self._folders.sync_way(os.path.dirname(path))

    def create(self, name: str, data: Buffer) -> Created:
        path = self._path(name)
        for _ in range(_LINK_TRIES):
            try:
                temporary = self._write_temporary(path, data)
            except OSError as exc:
                raise store_error(exc, "write", name, self.url) from exc
            try:
                os.link(temporary, path, src_dir_fd=self._at, dst_dir_fd=self._at, follow_symlinks=False)
            except FileExistsError:
                return Created.EXISTS  # perhaps ours: a network filesystem may repeat a request whose reply was lost
            except FileNotFoundError:
                continue  # another process deleted our temporary as a leftover
            except OSError as exc:
                return link_failed(name, exc, self.url)
            else:
                try:
                    self._folders.sync_way(os.path.dirname(path))
                except OSError:
                    return Created.UNKNOWN  # it is there, but perhaps not durable: `sync_folders` makes it so
                return Created.CREATED
            finally:
                self._unlink_quietly(temporary)
        raise BackendUnavailableError(f"cannot create {name}: its temporary was deleted {_LINK_TRIES} times; try again", object_id=name)

    def sync_folders(self, name: str) -> None:
        with os_errors("sync the folders of", name):
            self._folders.sync_all(os.path.dirname(self._path(name)))

    def open_writer(self, name: str) -> ObjectWriter:
        path = self._path(name)

        def seal(fd: int) -> None:
            try:
                self._folders.sync_way(os.path.dirname(path), fd)
            finally:
                os.close(fd)

        return self._writer(path, name, seal)

    def open_whole_writer(self, name: str) -> ObjectWriter:
        path = self._path(name)
        temporary = f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{ulid_text(new_ulid())}"

        def seal(fd: int) -> None:
            try:
                try:
                    self._folders.sync_file(fd)
                finally:
                    os.close(fd)  # before it has a name: what fails here leaves none
                os.link(temporary, path, src_dir_fd=self._at, dst_dir_fd=self._at, follow_symlinks=False)
                self._folders.sync_way(os.path.dirname(path))
            except FileNotFoundError as exc:  # another process deleted our temporary as a leftover
                raise BackendUnavailableError(f"cannot write {name}: its temporary was deleted; try again", object_id=name) from exc
            finally:
                self._unlink_quietly(temporary)

        return self._writer(temporary, name, seal)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            with os_errors("delete", name), contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self._path(name), dir_fd=self._at)

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        return (info for info in self._walk("", folders) if _is_temporary(info.name))

    def abort_upload(self, name: str) -> None:
        temporary = name.rpartition("/")[2]
        check_prefix(name.removesuffix(temporary))
        check_name(temporary.removeprefix("."))
        if not _is_temporary(name):
            raise CorruptObjectError(f"{name} is not a temporary of this store", object_id=name)
        with os_errors("delete", name), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(f"{self._root}/{name}", dir_fd=self._at)

    def close(self) -> None:
        """Nothing stays open between calls."""

    def _writer(self, path: str, name: str, seal: Callable[[int], None]) -> ObjectWriter:
        try:
            fd = self._open_new(path)
            try:
                is_direct = self._sync and use_direct(fd)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.close(fd)
                self._unlink_quietly(path)
                raise
        except OSError as exc:
            raise store_error(exc, "write", name, self.url) from exc
        kind = DirectWriter if is_direct else LocalWriter
        return kind(fd, name, self.url, seal=seal, unlink=partial(self._unlink_quietly, path))

    @property
    def _at(self) -> int | None:
        """The folder to which paths are relative; None: they are absolute."""
        return None if self._within is None else self._within.fd()

    def _path(self, name: str) -> str:
        if not NAME.fullmatch(name):
            raise bad_name(name)
        return f"{self._root}/{name}"

    def _open_new(self, path: str, *, is_second_try: bool = False) -> int:
        try:
            if self._within is not None:
                return os.open(path, NEW, FILE_MODE, dir_fd=self._within.fd())
            fd = make_as_owner(self._root, partial(os.open, path, NEW, 0o666))
        except FileNotFoundError:
            if is_second_try:
                raise
            self._folders.make(os.path.dirname(path))
            return self._open_new(path, is_second_try=True)
        inherit_from_root(fd, self._root)
        return fd

    def _write_file(self, path: str, data: Buffer, seal: Callable[[int], None]) -> None:
        """Writes a new file; `seal` makes it durable."""
        fd = self._open_new(path)
        try:
            try:
                write_at(fd, byte_views([data]), 0)
                seal(fd)
            finally:
                os.close(fd)
        except BaseException:
            self._unlink_quietly(path)
            raise

    def _write_temporary(self, path: str, data: Buffer) -> str:
        temporary = f"{os.path.dirname(path)}/{TEMPORARY_PREFIX}{ulid_text(new_ulid())}"
        self._write_file(temporary, data, self._folders.sync_file)
        return temporary

    def _unlink_quietly(self, path: str) -> None:
        """Removes a file that nothing refers to; `list_uploads` finds one that cannot be removed."""
        with contextlib.suppress(OSError):
            os.unlink(path, dir_fd=self._at)

    def _walk(self, prefix: str, inside: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        """`inside`: of the folders at the root, enter only these."""
        if self._within is not None:
            with os_errors("list", prefix or self.url):
                for path, status in self._within.files(f"{self._root}/{prefix}".removesuffix("/")):
                    yield ObjectInfo(path.removeprefix(f"{self._root}/"), status.st_size, status.st_mtime_ns, status.st_ctime_ns)
            return
        folders = [prefix]
        while folders:
            folder = folders.pop()
            for entry in self._entries(folder):
                with os_errors("list", folder + entry.name), contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        if folder or inside is None or entry.name in inside:
                            folders.append(f"{folder}{entry.name}/")
                        continue
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        yield ObjectInfo(folder + entry.name, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    def _entries(self, folder: str) -> Collection[os.DirEntry[str]]:
        with os_errors("list", folder or self._root):
            try:
                path = f"{self._root}/{folder}"
                return try_again(path, lambda: _scanned(path))
            except (FileNotFoundError, NotADirectoryError):
                return []


def _scanned(folder: str) -> Collection[os.DirEntry[str]]:
    with os.scandir(folder) as entries:
        return list(entries)


def _is_temporary(name: str) -> bool:
    return name.rpartition("/")[2].startswith(TEMPORARY_PREFIX)

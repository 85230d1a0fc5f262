"""The folders of a store: makes them, and makes new entries durable, with those of the folders on the way from the root.

The entries of folders are synced once per process, all of one folder together. A failed fsync is final: the kernel may report success next
time without writing anything. So the folder is changed before it is synced again. Folders are not removed: a handle would not know that
another one made a folder of the same name again.

On a disk of this host all syncs of one object run at once: one commit of the filesystem's journal serves them (on ext4 4.7 ms instead of 20
for a file and two folders). Their order does not matter: nobody knows the object's name yet, or the file was synced before it got its name.
They run one after another while another thread syncs an object: the journal commits both together anyway, and threads cost CPU time.
"""

import contextlib
import operator
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from typing import Final

from tensorstore_ck.backend.local_io import is_disk_of_this_host
from tensorstore_ck.backend.local_modes import make_as_owner, make_folder
from tensorstore_ck.common.descriptors import NO_FOLDER_SYNC
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.common.threads import ProcessLock, for_each
from tensorstore_ck.errors import NotAStoreError

TEMPORARY_PREFIX: Final = ".tmp-"
NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class DurableFolders:
    """The folders of one local store, from `root` on. Thread-safe."""

    def __init__(self, root: str, within: PrivateFolder | None, *, sync: bool) -> None:
        """With `within`, `root` is a path below that folder. Without `sync` nothing is synced."""
        self._root = root
        self._within = within
        self._sync = sync
        self.like: str | None = None
        """A folder whose mode and group `root` gets, and what is made above it."""
        self._durable: set[str] = set()
        self._failed: set[str] = set()
        self._locks: dict[str, ProcessLock] = {}
        self._is_on_disk: bool | None = None  # until the first sync
        self._syncing: set[int] = set()
        """The threads in `sync_way`."""

    def __getstate__(self) -> dict[str, object]:
        """Without locks, which no other process needs, and what is known of this host and its threads."""
        return {**self.__dict__, "_locks": {}, "_is_on_disk": None, "_syncing": set()}

    def sync_file(self, fd: int) -> None:
        """Makes a file durable that has no name yet, or gets another one."""
        if self._sync:
            os.fsync(fd)

    def sync_way(self, folder: str, fd: int | None = None) -> None:
        """Makes a new entry in `folder` durable, the entries of the folders on the way from the root, and the file `fd`.

        Those on the way are synced once per process, even if another process made them: it may have died before it synced them.
        """
        if not self._sync:
            return
        syncs: list[Callable[[], None]] = [partial(self.sync, folder)]
        durable = set(self._subfolders(folder) if folder == self._root else ())  # those that were there before the fsync
        while folder not in self._durable:
            durable.add(folder)
            if folder == self._root:
                syncs.append(self._sync_root_entry)
                break
            folder = os.path.dirname(folder)
            durable.update(self._subfolders(folder))
            syncs.append(partial(self.sync, folder))
        if self._is_on_disk is None:
            self._is_on_disk = is_disk_of_this_host(os.stat(self._root, dir_fd=self._at))
        at_once, thread = self._is_on_disk and not self._syncing, threading.get_ident()
        if fd is not None:
            syncs.insert(0, partial(_sync_and_close, FileIO(os.dup(fd))) if at_once else partial(os.fsync, fd))
        try:
            self._syncing.add(thread)
            if at_once:
                for_each(syncs, operator.call, len(syncs))
            else:
                for sync in syncs:
                    sync()
        finally:
            self._syncing.discard(thread)
        self._durable.update(durable)  # not before: a folder is durable once the root's entry is, and that may fail

    def sync_all(self, folder: str) -> None:
        """Makes all entries of `folder` and of the folders on the way from the root durable, whatever was synced before."""
        self.sync(folder)
        while folder != self._root:
            folder = os.path.dirname(folder)
            self.sync(folder)
        self._sync_root_entry()

    def make(self, folder: str, *, is_second_try: bool = False) -> None:
        """Makes a folder, and those above it. `sync_way` makes those from the root on durable, and this the others."""
        if self._within is not None:
            self._within.make_folders(folder)
            return
        like = self._root if folder.startswith(f"{self._root}/") else self.like
        try:
            if like is not None:
                make_as_owner(like, partial(make_folder, folder, like))
            else:
                os.mkdir(folder, 0o777)
        except FileExistsError as exc:
            if os.path.islink(folder) and not os.path.exists(folder):
                raise NotAStoreError(
                    f"{folder} is a link to {os.readlink(folder)}, which is not there: mount its disk, or make that folder",
                    object_id=folder,
                ) from exc
            return
        except FileNotFoundError:
            if is_second_try:
                raise  # its parent exists, and accepts no folders
            self.make(os.path.dirname(folder))
            self.make(folder, is_second_try=True)
            return
        self._durable.discard(folder)  # an earlier folder of this name was removed
        if self._root.startswith(f"{folder}/"):
            self.sync(os.path.dirname(folder))

    def sync(self, folder: str) -> None:
        """Makes all entries of `folder` durable.

        After a failed fsync the next one may report success without writing anything, in another process too. So the folder is changed
        first: a journal commits in order, hence a change that is durable proves that all earlier ones are.
        """
        if not self._sync:
            return
        lock = self._locks.get(folder) or self._locks.setdefault(folder, ProcessLock())
        with lock.here:  # one at a time: a thread must know of another one's failed fsync before its own succeeds
            if folder in self._failed:
                self._change(folder)
            fd = os.open(folder, _FOLDER, dir_fd=self._at)
            try:
                os.fsync(fd)
            except OSError as exc:
                if exc.errno not in NO_FOLDER_SYNC:
                    self._failed.add(folder)
                    exc.filename = folder
                    raise
            finally:
                os.close(fd)

    @property
    def _at(self) -> int | None:
        """The folder to which paths are relative; None: they are absolute."""
        return None if self._within is None else self._within.fd()

    def _subfolders(self, folder: str) -> Sequence[str]:
        if self._within is not None:
            return ()
        with os.scandir(folder) as entries:
            return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]

    def _sync_root_entry(self) -> None:
        with contextlib.suppress(PermissionError):  # the folder above is another user's, and need not be readable
            self.sync(os.path.dirname(self._root) or ".")

    def _change(self, folder: str) -> None:
        temporary = f"{folder}/{TEMPORARY_PREFIX}{ulid_text(new_ulid())}"
        os.close(os.open(temporary, NEW, FILE_MODE, dir_fd=self._at))
        with contextlib.suppress(OSError):  # `list_uploads` finds it
            os.unlink(temporary, dir_fd=self._at)


def _sync_and_close(file: FileIO) -> None:
    """Syncs a file of its own: if Ctrl-C is pressed twice, this goes on when the caller has closed its one, and the number is another's."""
    with file:
        os.fsync(file.fileno())

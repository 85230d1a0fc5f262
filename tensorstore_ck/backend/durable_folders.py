"""The folders of a store: makes them, and makes new entries durable, with those of the folders on the way from the root.

The entries of folders are synced once per process, all of one folder together. A failed fsync is final: the kernel may report success next
time without writing anything. So the folder is changed before it is synced again. Folders are not removed: a handle would not know that
another one made a folder of the same name again.
"""

import contextlib
import errno
import os
from collections.abc import Sequence
from functools import partial
from typing import Final

from tensorstore_ck.backend.local_modes import make_as_owner, make_folder
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.common.threads import ProcessLock

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
        self._durable: set[str] = set()
        self._failed: set[str] = set()
        self._locks: dict[str, ProcessLock] = {}

    def __getstate__(self) -> dict[str, object]:
        """Without locks, which no other process needs."""
        return {**self.__dict__, "_locks": {}}

    def sync_way(self, folder: str) -> None:
        """Makes a new entry in `folder` durable, and the entries of the folders on the way from the root.

        Those on the way are synced once per process, even if another process made them: it may have died before it synced them.
        """
        if not self._sync:
            return
        durable = set(self._subfolders(folder) if folder == self._root else ())  # those that were there before the fsync
        self.sync(folder)
        while folder not in self._durable:
            durable.add(folder)
            if folder == self._root:
                self._sync_root_entry()
                break
            folder = os.path.dirname(folder)
            durable.update(self._subfolders(folder))
            self.sync(folder)
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
        try:
            if folder.startswith(f"{self._root}/"):
                make_as_owner(self._root, partial(make_folder, folder, self._root))
            else:
                os.mkdir(folder, 0o777)
        except FileExistsError:
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
            fd = os.open(folder, _FOLDER, dir_fd=self.at)
            try:
                os.fsync(fd)
            except OSError as exc:
                if exc.errno != errno.EINVAL:  # EINVAL: this filesystem has no fsync for folders
                    self._failed.add(folder)
                    exc.filename = folder
                    raise
            finally:
                os.close(fd)

    @property
    def at(self) -> int | None:
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
        os.close(os.open(temporary, NEW, FILE_MODE, dir_fd=self.at))
        with contextlib.suppress(OSError):  # `list_uploads` finds it
            os.unlink(temporary, dir_fd=self.at)

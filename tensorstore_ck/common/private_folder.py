"""A folder of this user alone, below one where other users of the host may write.

The folder is opened and checked once. Everything below is reached from that handle, even if the path leads elsewhere later.
"""

import contextlib
import os
import stat
import threading
import weakref
from collections.abc import Callable, Iterator

from tensorstore_ck.common.descriptors import sync_path
from tensorstore_ck.common.ids import new_ulid, ulid_text
from tensorstore_ck.common.owned_files import FILE_MODE, FOLDER_MODE, open_own_folder, require_safe_parent, scan, secure
from tensorstore_ck.errors import PermissionDeniedError


class PrivateFolder:
    """The folder at `path`, opened when it is first used; thread-safe. Paths below it are relative to it."""

    def __init__(self, path: str, advice: str = "") -> None:
        """`advice` ends the message that another user owns the folder."""
        self.path = path
        self._advice = advice
        self._lock = threading.Lock()
        self._fd = -1
        self._close: Callable[[], object] = lambda: None
        self.on_remade: Callable[[int], object] = lambda fd: None
        """Called with the handle of the folder that `make` made because the one in use was deleted."""

    def fd(self) -> int:
        """The folder's handle.

        Raises:
            FileNotFoundError: the folder is not there.
            PermissionDeniedError: it, or something in it, is not this user's alone.
        """
        with self._lock:
            if self._fd < 0:
                self._open()
            return self._fd

    def make(self) -> int:
        """As `fd`, but makes the folder if it is not there, or was deleted since."""
        with self._lock:
            is_deleted = self._fd >= 0 and not os.fstat(self._fd).st_nlink
            if self._fd < 0 or is_deleted:
                parent = os.path.dirname(self.path)
                os.makedirs(parent, FOLDER_MODE, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.path, FOLDER_MODE)
                self._open()
                if is_deleted:
                    self.on_remade(self._fd)
                self._sync_entry(parent)
            return self._fd

    def _sync_entry(self, parent: str) -> None:
        """Makes this folder's entry in `parent` durable. If that fails, the next call makes the folder again, if it is empty."""
        try:
            with contextlib.suppress(PermissionError):  # the folder above is another user's, and need not be readable
                sync_path(parent)
        except OSError:
            self._fd = -1
            self._close()
            with contextlib.suppress(OSError):
                os.rmdir(self.path)
            raise

    def close(self) -> None:
        """Closes the handle; the next call opens and checks the folder again."""
        with self._lock:
            self._fd = -1
            self._close()

    def make_folders(self, folder: str) -> None:
        """Makes a folder below this one, with its parents."""
        fd = self.make()
        try:
            os.mkdir(folder, FOLDER_MODE, dir_fd=fd)
        except FileExistsError:
            return
        except FileNotFoundError:
            self.make_folders(os.path.dirname(folder) or ".")
            with contextlib.suppress(FileExistsError):  # another thread or rank made it meanwhile
                os.mkdir(folder, FOLDER_MODE, dir_fd=fd)

    def open_nameless(self, folder: str = ".") -> int:
        """A new file without a name, which is gone when it is closed."""
        self.make_folders(folder)
        name = f"{folder}/.tmp-{ulid_text(new_ulid())}"
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=self.fd())
        with contextlib.suppress(FileNotFoundError):  # a process that begins to use the folder may delete the file as a leftover
            os.unlink(name, dir_fd=self.fd())
        return fd

    def files(self, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        """Every regular file below a folder; those deleted meanwhile are left out."""
        folders = [folder]
        while folders:
            folder = folders.pop()
            try:
                files_and_folders = scan(folder, self.fd())
            except (FileNotFoundError, NotADirectoryError):
                continue
            for name, status in files_and_folders:
                if stat.S_ISDIR(status.st_mode):
                    folders.append(f"{folder}/{name}")
                elif stat.S_ISREG(status.st_mode):
                    yield f"{folder}/{name}", status

    def _open(self) -> None:
        require_safe_parent(os.path.dirname(self.path))
        user = os.geteuid()
        try:
            fd = open_own_folder(self.path, user)
        except PermissionDeniedError as exc:
            raise PermissionDeniedError(f"{exc}{self._advice}", object_id=self.path) from None
        try:
            secure(fd, self.path, user)
        except BaseException:
            os.close(fd)
            raise
        if self._fd < 0:
            self._fd, self._close = fd, weakref.finalize(self, os.close, fd)
        else:  # the open folder was deleted: other threads continue with the new one under the same number
            os.dup2(fd, self._fd, inheritable=False)
            os.close(fd)

"""Who uses a folder: each user holds a shared lock on one file in it, which the kernel releases when the process ends in any way.

A process that finds no other lock knows that nobody else is in the middle of anything there.
"""

import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder


class FolderLock:
    """A lock on the file `name` of `folder`, until `end`."""

    def __init__(self, folder: PrivateFolder, name: str, sweep: Callable[[], object]) -> None:
        """`sweep` is called if no other process has a lock; processes that come meanwhile wait for it."""
        path = f"{folder.path}/{name}"
        with os_errors("lock", path):
            fd = _open(name, folder.make())
        self.end = weakref.finalize(self, os.close, fd)
        """Releases the lock; idempotent."""
        with os_errors("lock", path):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep()
            fcntl.flock(fd, fcntl.LOCK_SH)
        folder.on_remade = partial(self._lock_again, name, fd)

    def _lock_again(self, name: str, fd: int, folder_fd: int) -> None:
        """Locks the file in the folder that was made after the one in use was deleted together with its lock."""
        if not self.end.alive:
            return
        with closing_fd(_open(name, folder_fd)) as new:
            fcntl.flock(new, fcntl.LOCK_SH)
            os.dup2(new, fd, inheritable=False)


def _open(name: str, folder_fd: int) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=folder_fd)

"""Who uses a folder: everybody has a lock on one file in it, which the kernel takes back from a process that ends, however it does.

So whoever finds no other lock knows that nobody else is in the middle of anything there.
"""

import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder


class FolderLock:
    """A lock on the file `name` of `folder`, until `end`."""

    def __init__(self, folder: PrivateFolder, name: str, sweep: Callable[[], object]) -> None:
        """`sweep` is called if nobody else has one; those who come meanwhile wait for it."""
        path = f"{folder.path}/{name}"
        with os_errors("lock", path):
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=folder.make())
        self.end = weakref.finalize(self, os.close, fd)
        """Gives it back; idempotent."""
        with os_errors("lock", path):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep()
            fcntl.flock(fd, fcntl.LOCK_SH)

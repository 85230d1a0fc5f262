"""Who uses a folder: everybody has a lock on one file in it, which the kernel takes back from a process that ends, however it does.

So whoever finds no other lock knows that nobody else is in the middle of anything there.
"""

import fcntl
import os
import weakref
from collections.abc import Callable
from contextlib import suppress

from tensorstore_ck.backend.oserrors import os_errors


class Lease:
    """A lock on `path`, until `end`."""

    def __init__(self, path: str, sweep: Callable[[], object]) -> None:
        """`sweep` is called if nobody else has one; those who come meanwhile wait for it."""
        with os_errors("lock", path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self.end = weakref.finalize(self, os.close, fd)
        """Gives it back; idempotent."""
        with os_errors("lock", path):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sweep()
            fcntl.flock(fd, fcntl.LOCK_SH)

"""File descriptors that a block closes, and paths made durable."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

NOT_SUPPORTED: Final = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, 524})
"""The filesystem cannot do that; 524 is ENOTSUPP, which NFS passes on from servers that know no hard links, such as Azure's."""
NO_FOLDER_SYNC: Final = NOT_SUPPORTED | {errno.EINVAL, errno.EBADF}
"""What filesystems answer that have no fsync for folders, such as SMB."""


@contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """`fd`, which the end of the ``with`` block closes."""
    try:
        yield fd
    finally:
        os.close(fd)


def sync_path(path: str) -> None:
    """Makes a file or a folder durable."""
    with closing_fd(os.open(path, os.O_RDONLY)) as fd:
        try:
            os.fsync(fd)
        except OSError as exc:
            if exc.errno not in NO_FOLDER_SYNC or not stat.S_ISDIR(os.fstat(fd).st_mode):
                raise

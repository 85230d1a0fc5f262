"""Disk space for a file that is written through a memory map: where a page has none, the write is a SIGBUS, and not an error."""

import os
from pathlib import Path


def allocate(path: Path, size_bytes: int) -> None:
    """Makes a file of that size if there is none, and allocates all pages of the one that is there.

    Raises:
        OSError: the disk is full, or the file cannot be used.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        status = os.fstat(fd)
        if not status.st_size or status.st_blocks * 512 < status.st_size:
            os.posix_fallocate(fd, 0, status.st_size or size_bytes)
    except OSError as exc:
        exc.filename = str(path)
        raise
    finally:
        os.close(fd)

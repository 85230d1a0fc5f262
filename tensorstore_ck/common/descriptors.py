"""File descriptors that a block closes, and paths made durable."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


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
        os.fsync(fd)

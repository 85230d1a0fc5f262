"""Writes or replaces a small file at once, where other users may write to the folder.

The new file has a name that nobody can guess, and is created exclusively: a link that somebody put there first is never written through.
"""

import contextlib
import os
import secrets
from typing import Final

from tensorstore_ck.common.descriptors import closing_fd

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def replace_file(path: str | os.PathLike[str], data: bytes, *, mode: int = 0o666) -> None:
    """Writes `data` to a new file, which then replaces what is at `path`; a link at `path` is replaced, not followed.

    Raises:
        OSError: the file cannot be written.
    """
    folder, name = os.path.split(os.fspath(path))
    with closing_fd(os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as folder_fd:
        replace_file_in(folder_fd, name, data, mode=mode)


def replace_file_in(folder_fd: int, name: str, data: bytes, *, mode: int) -> None:
    """See `replace_file`; in an open folder, wherever its path leads by now."""
    temporary = f".{name}.{secrets.token_hex(8)}"
    try:
        with open(os.open(temporary, _NEW, mode, dir_fd=folder_fd), "wb") as file:
            file.write(data)
        os.rename(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder_fd)
        raise

"""Another user's staging folder, made root's for a while, so that root can publish what that user's ended job staged.

A checked file must not change before it is used, even if that user writes to the folder meanwhile. So first the folders become root's, from
the top down, then their files, which nobody else can replace any more; and no process may have one open for writing. At the end everything
is given back, from the bottom up. A process that dies in between leaves the folder to root.
"""

import errno
import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.backend.staging.folder import USERS
from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.common.owned_files import closed_folders, open_own_folder, scan
from tensorstore_ck.errors import InvalidOptionError, PermissionDeniedError
from tensorstore_ck.redaction import one_line

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HELD: Final = {errno.EAGAIN, errno.EBUSY}


@contextmanager
def taken_over(path: str, owner: int) -> Iterator[None]:
    """Gives the folder at `path`, which belongs to `owner`, to this user until the block ends.

    Raises:
        MissingObjectError: there is none.
        PermissionDeniedError: this user is not root, or something there is not `owner`'s alone; nothing was changed.
        InvalidOptionError: it is in use.
    """
    user = os.geteuid()
    if user == owner:
        yield
        return
    if user != 0:
        raise PermissionDeniedError(f"only root can publish or drop what another user staged in {path}", object_id=path)
    with os_errors("take over", path):
        fd = open_own_folder(path, owner)
    with closing_fd(fd):
        with os_errors("take over", path):
            _require_unused(fd, path, owner)
            _take(fd, path, owner, user)
        try:
            yield
        finally:
            with os_errors("give back", path):
                _give_back(fd, owner)


def _take(fd: int, path: str, owner: int, user: int) -> None:
    taken: list[str] = []
    try:
        for _ in closed_folders(fd, path, owner, taker=user, taken=taken.append):
            pass
    except BaseException:
        _chown_folders(fd, reversed(taken), owner)
        raise
    try:
        for _, at, files in closed_folders(fd, path, user, files_of=owner):
            for name, _ in files:
                os.chown(name, user, -1, dir_fd=at, follow_symlinks=False)
        for folder, at, files in closed_folders(fd, path, user):
            for name, _ in files:
                _require_unwritten(name, at, os.path.normpath(f"{path}/{folder}/{name}"), owner)
    except BaseException:
        _give_back(fd, owner)
        raise


def _give_back(fd: int, owner: int) -> None:
    """Only this user has put anything there since it was checked."""
    folders = ["."]
    for folder in folders:  # grows meanwhile
        with closing_fd(os.open(folder, _FOLDER, dir_fd=fd)) as at:
            for name, found in scan(".", at):
                if stat.S_ISDIR(found.st_mode):
                    folders.append(f"{folder}/{name}")
                elif found.st_nlink == 1:
                    os.chown(name, owner, -1, dir_fd=at, follow_symlinks=False)
    _chown_folders(fd, reversed(folders), owner)


def _chown_folders(fd: int, folders: Iterable[str], owner: int) -> None:
    for folder in folders:
        with closing_fd(os.open(folder, _FOLDER, dir_fd=fd)) as at:
            os.fchown(at, owner, -1)


def _require_unused(fd: int, path: str, owner: int) -> None:
    with suppress(FileNotFoundError), closing_fd(os.open(USERS, _FILE, dir_fd=fd)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _in_use(path, owner) from None


def _require_unwritten(name: str, dir_fd: int, path: str, owner: int) -> None:
    """Checks that no process has a file open for writing: the kernel then grants no lease on it."""
    with closing_fd(os.open(name, _FILE, dir_fd=dir_fd)) as file:
        try:
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as exc:
            if exc.errno in _HELD:
                raise _in_use(path, owner) from None
            raise


def _in_use(path: str, owner: int) -> InvalidOptionError:
    return InvalidOptionError(
        f"{one_line(path)} is in use by a process of user {owner}, which publishes its snapshots: end it first, or let it finish",
        object_id=path,
    )

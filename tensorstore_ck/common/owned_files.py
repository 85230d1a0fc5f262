"""Checks that files and folders belong to one user alone, below folders where other users may write, such as ``/dev/shm``.

Each folder is checked through a handle that was opened without following a link. Its permissions are restricted before its contents are
checked, from the top down: from then on only this user and root can put anything there.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Final

from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.errors import PermissionDeniedError
from tensorstore_ck.redaction import one_line

FOLDER_MODE: Final = 0o700
FILE_MODE: Final = 0o600

Files = list[tuple[str, os.stat_result]]

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REFUSED: Final = {errno.ENOTDIR, errno.ELOOP, errno.EACCES}
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


def open_own_folder(path: str, owner: int, dir_fd: int | None = None, *, shown: str = "") -> int:
    """A handle of a folder that is not a link and belongs to `owner`. `shown` names it in messages, by default its path.

    Raises:
        PermissionDeniedError: it is something else.
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, _FOLDER, dir_fd=dir_fd)
    except OSError as exc:
        if exc.errno in _REFUSED:
            _require_folder(os.stat(path, dir_fd=dir_fd, follow_symlinks=False), shown or path, owner)
        raise
    try:
        _require_folder(os.fstat(fd), shown or path, owner)
    except BaseException:
        os.close(fd)
        raise
    return fd


def require_safe_parent(path: str) -> None:
    """Checks that no other user can replace entries of a folder, and that it is not a link that another user made.

    Raises:
        PermissionDeniedError: one of these.
    """
    link, target = os.lstat(path), os.stat(path)
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in (0, os.geteuid()):
        raise _refused(path, f"is a symbolic link that user {link.st_uid} made")
    if target.st_mode & stat.S_IWOTH and not target.st_mode & stat.S_ISVTX:
        raise PermissionDeniedError(
            f"{one_line(path)} can be written by every user of this host, each of whom can replace what lies there: "
            "`chmod o-w` it, or `chmod +t` it if they share it",
            object_id=path,
        )


def secure(fd: int, path: str, owner: int) -> None:
    """Restricts the folder `fd`, which is at `path`, and everything below it to `owner`, from the top down.

    Raises:
        PermissionDeniedError: something there is not a folder, nor a regular file with one name, that belongs to the owner.
        OSError: it cannot be changed.
    """
    for _, at, files in closed_folders(fd, path, owner):
        for name, status in files:
            if status.st_mode & _OTHERS:
                with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                    os.chmod(name, FILE_MODE, dir_fd=at)


def closed_folders(
    fd: int,
    path: str,
    owner: int,
    *,
    files_of: int | None = None,
    taker: int | None = None,
    taken: Callable[[str], object] = lambda _: None,
) -> Iterator[tuple[str, int, Files]]:
    """The folder `fd` and all below it, each closed to others and then checked; its files belong to `files_of`, by default its owner.

    With a `taker`, each folder is first given to that user, and `taken` is called with its path. Yields (path below `fd`, a handle that is
    valid until the next item, the files in it).

    Raises:
        PermissionDeniedError: see `secure`.
        OSError: one cannot be changed.
    """
    folders = ["."]
    for folder in folders:  # grows meanwhile
        shown = path if folder == "." else f"{path}/{folder}"
        try:
            at = open_own_folder(folder, owner, fd, shown=shown)
        except FileNotFoundError:
            continue  # deleted meanwhile
        try:
            if taker is not None:
                os.fchown(at, taker, -1)
                taken(folder)
            if os.fstat(at).st_mode & _OTHERS:
                os.fchmod(at, FOLDER_MODE)
            files_and_folders = scan(".", at)
            folders += [name if folder == "." else f"{folder}/{name}" for name, status in files_and_folders if stat.S_ISDIR(status.st_mode)]
            files = [(name, status) for name, status in files_and_folders if not stat.S_ISDIR(status.st_mode)]
            for name, status in files:
                _require_file(status, f"{shown}/{name}", owner if files_of is None else files_of)
            yield folder, at, files
        finally:
            os.close(at)


def scan(folder: str, dir_fd: int) -> Files:
    """The entries of a folder; those deleted meanwhile are left out. Raises `OSError` if it is not a folder, or cannot be read."""
    files: Files = []
    with closing_fd(os.open(folder, _FOLDER, dir_fd=dir_fd)) as fd, os.scandir(fd) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                files.append((entry.name, entry.stat(follow_symlinks=False)))
    return files


def _require_folder(status: os.stat_result, path: str, owner: int) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _refused(path, "is a symbolic link")
    if not stat.S_ISDIR(status.st_mode):
        raise _refused(path, "is not a folder")
    _require_owner(status, path, owner)


def _require_file(status: os.stat_result, path: str, owner: int) -> None:
    if stat.S_ISLNK(status.st_mode):
        raise _refused(path, "is a symbolic link")
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, "is not a regular file")
    _require_owner(status, path, owner)
    if status.st_nlink > 1:
        raise _refused(path, f"has {status.st_nlink} names (hard links), some perhaps where other users reach them")


def _require_owner(status: os.stat_result, path: str, owner: int) -> None:
    if status.st_uid != owner:
        raise _refused(path, f"is not owned by user {owner}, but by user {status.st_uid}")


def _refused(path: str, what: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{one_line(path)} {what}: another user of this host may have put it there, so it is not used; remove it, or name another folder",
        object_id=path,
    )

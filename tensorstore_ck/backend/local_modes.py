"""Access to the files of a store in a folder: the users of its root folder have it, as with git's `core.sharedRepository`.

Files and folders get the mode and the group of the root folder, whatever the umask of the process, root's included. If the root folder
has a default ACL, the kernel gives that to everything below, and modes are left to it. Files that root makes belong to the folder's owner.
"""

import ctypes
import functools
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, TypeVar

from tensorstore_ck.common.descriptors import closing_fd

T = TypeVar("T")

FOLDER_BITS: Final = 0o2777
FILE_BITS: Final = 0o666
GROUP_BITS: Final = 0o2070
_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def make_as_owner(root: str, make: Callable[[], T]) -> T:
    """Calls `make`, which makes a file or folder below `root`, and returns its result. The root user acts as the owner of `root`, if that
    user may write there.

    The root user gives no file away: a link in a user's folder could lead to any other file.
    """
    owner = None
    if os.geteuid() == 0 and (calls := _filesystem_ids()) is not None:
        with suppress(OSError):  # `make` finds the same
            owner = os.stat(root)
    if owner is None or owner.st_uid == 0:
        return make()
    try:
        calls.setfsgid(owner.st_gid)
        calls.setfsuid(owner.st_uid)
        return make()
    except PermissionError:
        pass
    finally:
        calls.setfsuid(0)
        calls.setfsgid(os.getegid())
    return make()


@functools.cache
def _filesystem_ids() -> Any:
    """The library with the calls that change a thread's ids for files alone; None where there are none."""
    library = ctypes.CDLL(None)
    return library if hasattr(library, "setfsuid") else None


def make_folder(folder: str, root: str) -> None:
    """Makes a folder below `root` that is like it. Changes its mode by a handle: another user may put a link in its place.

    Raises:
        FileNotFoundError: its parent is not there.
        OSError: it is there, or cannot be made.
    """
    parent, name = os.path.split(folder)
    at = os.open(parent, _FOLDER | getattr(os, "O_PATH", 0))  # a folder that may be written to, but not listed, is enough
    try:
        os.mkdir(name, 0o777, dir_fd=at)
        with suppress(OSError):  # deleted meanwhile
            fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=at)
            try:
                inherit_from_root(fd, root)
            finally:
                os.close(fd)
    finally:
        os.close(at)


def inherit_from_root(made: int, root: str) -> None:
    """Gives an open file or folder the mode and group of `root`, as far as this user and the filesystem can."""
    with suppress(OSError):  # some filesystems have no modes
        wanted, present = os.stat(root), os.fstat(made)
        if present.st_gid != wanted.st_gid:
            with suppress(OSError):  # not a group of this user's
                os.chown(made, -1, wanted.st_gid)
        mode = mode_below(wanted, is_folder=stat.S_ISDIR(present.st_mode))
        if stat.S_IMODE(present.st_mode) != mode and not has_default_acl(root):
            os.chmod(made, mode)


def mode_below(root: os.stat_result, *, is_folder: bool) -> int:
    """The mode of folders, or files, in a store whose root folder is `root`."""
    return root.st_mode & (FOLDER_BITS if is_folder else FILE_BITS)


def has_default_acl(folder: str) -> bool:
    """Whether new files in a folder get their access from the folder's ACL."""
    try:
        return bool(os.getxattr(folder, "system.posix_acl_default"))
    except (OSError, AttributeError):  # it has none, or the system knows none
        return False


def files_unlike_root(root: str, names: Iterable[str], *, change: bool = False) -> list[str]:
    """Files and folders whose mode or group is not the one that `inherit_from_root` gives, sorted by name.

    `names`: the store's files and folders in `root`; only these, and those below them, are looked at. `change`: gives them that mode and
    group, and returns those that this user could change. Follows no links, and leaves files with several names alone.
    """
    wanted, acl_decides = os.stat(root), has_default_acl(root)
    paths = []

    def is_like(status: os.stat_result) -> bool:
        mode = mode_below(wanted, is_folder=stat.S_ISDIR(status.st_mode))
        return status.st_gid == wanted.st_gid and (acl_decides or stat.S_IMODE(status.st_mode) == mode)

    def look(path: str, name: str, at: int) -> None:
        with suppress(FileNotFoundError):  # deleted meanwhile
            status = os.stat(name, dir_fd=at, follow_symlinks=False)
            is_ours = stat.S_ISDIR(status.st_mode) or (stat.S_ISREG(status.st_mode) and status.st_nlink == 1)
            if is_ours and not is_like(status) and (not change or is_like(_changed(name, at, status, root))):
                paths.append(path)

    with closing_fd(os.open(root, _FOLDER)) as top:
        for name in names:
            look(name, name, top)
            with suppress(FileNotFoundError, NotADirectoryError):
                for folder, folders, files, at in os.fwalk(name, dir_fd=top):
                    for entry in (*folders, *files):
                        look(f"{folder}/{entry}", entry, at)
    return sorted(paths)


def _changed(name: str, at: int, status: os.stat_result, root: str) -> os.stat_result:
    """The status after `inherit_from_root`, unless something else has that name by now."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=at)
    except OSError:  # this user may not read it, so it is another user's
        return status
    with closing_fd(fd):
        if os.path.samestat(os.fstat(fd), status):
            inherit_from_root(fd, root)
        return os.fstat(fd)


def share_with_group(root: str) -> None:
    """Makes a store's root folder, if it is not there, and lets its group do everything in it.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    os.makedirs(root, exist_ok=True)
    os.chmod(root, stat.S_IMODE(os.stat(root).st_mode) | GROUP_BITS)

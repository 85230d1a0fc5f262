"""Who may use what a store in a folder is made of: whoever may use its root folder, as with git's `core.sharedRepository`.

Files and folders get the mode and the group of the root folder, whatever the umask of the process, root's included. If the root folder
has a default ACL, the kernel gives that to everything below, and modes are left to it. What root makes belongs to the folder's owner.
"""

import ctypes
import functools
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

T = TypeVar("T")

FOLDER_BITS: Final = 0o2777
FILE_BITS: Final = 0o666
GROUP_BITS: Final = 0o2070


def make_as_owner(root: str, make: Callable[[], T]) -> T:
    """What `make` returns, which makes a file or folder below `root`. Root does it as the owner of `root`, if that user may.

    Root does not give away what it made: a link in a user's folder could lead to any other place.
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


def inherit_from_root(made: int | str, root: str) -> None:
    """Gives a new file or folder of this process the mode and group of `root`, as far as this user and the filesystem can."""
    with suppress(OSError):  # some filesystems have no modes
        wanted, found = os.stat(root), os.stat(made)
        if found.st_gid != wanted.st_gid:
            with suppress(OSError):  # not a group of this user's
                os.chown(made, -1, wanted.st_gid)
        mode = mode_below(wanted, is_folder=stat.S_ISDIR(found.st_mode))
        if stat.S_IMODE(found.st_mode) != mode and not has_default_acl(root):
            os.chmod(made, mode)


def mode_below(root: os.stat_result, *, is_folder: bool) -> int:
    """The mode of folders, or files, in a store whose root folder is `root`."""
    return root.st_mode & (FOLDER_BITS if is_folder else FILE_BITS)


def has_default_acl(folder: str) -> bool:
    """Whether what is made in a folder gets its access from the folder's ACL."""
    try:
        return bool(os.getxattr(folder, "system.posix_acl_default"))
    except (OSError, AttributeError):  # it has none, or the system knows none
        return False


def share_with_group(root: str) -> None:
    """Makes a store's root folder, if it is not there, and lets its group do everything in it.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    os.makedirs(root, exist_ok=True)
    os.chmod(root, stat.S_IMODE(os.stat(root).st_mode) | GROUP_BITS)

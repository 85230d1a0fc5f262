"""From an `OSError` to this package's errors: one table for all that a filesystem can answer.

Knows errno values and nothing of stores. A value that is not in the table counts as a transient fault of the filesystem.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tensorstore_ck.backend.object_names import MISSING_ADVICE
from tensorstore_ck.backend.protocol import Created
from tensorstore_ck.common.descriptors import NOT_SUPPORTED
from tensorstore_ck.common.free_space import disk_of
from tensorstore_ck.errors import (
    BackendUnavailableError,
    MissingObjectError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
    UnsafeBackendError,
)

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR}
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMLINK}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_NO_HARD_LINKS = NOT_SUPPORTED | {errno.EPERM, errno.EINVAL, errno.EXDEV, errno.EMLINK, errno.ENOTTY}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP}
_ADVICE = {
    errno.ENOENT: MISSING_ADVICE,
    errno.EISDIR: "a folder is there instead of a file",
    errno.ENOTDIR: "a file is there instead of a folder",
    errno.ENOSPC: "free space or inodes on that filesystem, then try again",
    errno.EDQUOT: "your quota is used up: free space or have it raised, then try again",
    errno.EFBIG: "the filesystem or `ulimit -f` does not allow files of that size",
    errno.EMLINK: "the folder cannot hold more entries",
    errno.EACCES: "check the owner and mode of the file and of the folders above it",
    errno.EPERM: "check the owner and attributes of the file",
    errno.EROFS: "the filesystem is mounted read-only: see the system's log for the cause, then mount it writable",
    errno.ELOOP: "a symbolic link is there instead of a file; the store never follows links",
    errno.EMFILE: "this process has too many open files: raise `ulimit -n`",
    errno.ENFILE: "this host has too many open files",
    errno.ENOMEM: "the host is out of memory",
    errno.EEXIST: "an object of that name exists, though the name was new: try again, with a new name",
    errno.ESTALE: "the network filesystem lost its handle: try again",
    errno.ETIMEDOUT: "the network filesystem did not answer: try again",
    errno.EIO: "the device or network filesystem reported an error: see the system's log, then try again",
}

_UNSUITABLE = "this filesystem cannot do that: use another one"


def store_error(exc: OSError, action: str, name: str, folder: str = "") -> StoreError:
    """This package's error for `exc`, raised by `action` on the object `name`; below `folder`, whose disk is named if it is full."""
    code = exc.errno or errno.EIO
    text = f"cannot {action} {name}: {os.strerror(code)} ({errno.errorcode.get(code, code)})"
    if exc.filename:
        text += f" at {os.fsdecode(exc.filename)}"
        text += _who(os.fsdecode(exc.filename)) if code in (errno.EACCES, errno.EPERM) else ""
    if code in _FULL and folder and (disk := disk_of(folder)):
        text += f": {disk}"
    text += f"; {_UNSUITABLE if code in NOT_SUPPORTED else _ADVICE.get(code, 'try again')}"
    if code in _MISSING:
        return MissingObjectError(text, object_id=name)
    if code in _NO_SPACE:
        return NoSpaceError(text, object_id=name)
    if code in _DENIED:
        return PermissionDeniedError(text, object_id=name)
    return BackendUnavailableError(text, object_id=name)


def _who(path: str) -> str:
    """Names the user who lacks the right, and the owner of the file, as far as this user can see that."""
    text = f" for user {os.geteuid()}"
    if os.path.isabs(path):  # else it is relative to a folder that is not known here
        with suppress(OSError):
            found = os.lstat(path)
            text += f" (it is user {found.st_uid}'s, mode {stat.filemode(found.st_mode)})"
    return text


@contextmanager
def os_errors(action: str, name: str, folder: str = "") -> Iterator[None]:
    """Turns every `OSError` raised inside into a `StoreError`: see `store_error`."""
    try:
        yield
    except OSError as exc:
        raise store_error(exc, action, name, folder) from exc


def link_failed(name: str, exc: OSError, folder: str) -> Created:
    """Raises if surely no link was made; otherwise it may have been made."""
    if exc.errno in _NO_HARD_LINKS:
        raise UnsafeBackendError(
            f"cannot create {name}: {os.strerror(exc.errno)}; this filesystem has no hard links, so commits cannot be exclusive on it. "
            "Keep the store on another filesystem or on an object store",
            object_id=name,
        ) from exc
    error = store_error(exc, "create", name, folder)
    if isinstance(error, BackendUnavailableError):
        return Created.UNKNOWN
    raise error from exc

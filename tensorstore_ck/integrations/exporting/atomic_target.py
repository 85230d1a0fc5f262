"""The target of an export: written under a temporary name next to it, made durable, then renamed.

So the target is either complete or unchanged. Tensor names never become file names. A folder is replaced only if an export could have
written everything in it: a typing error must not delete a home folder. Follows no links. Knows no formats and no stores.
"""

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, NamedTuple

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.descriptors import sync_path
from tensorstore_ck.common.free_space import mount_point
from tensorstore_ck.common.local_path import local_path
from tensorstore_ck.errors import AlreadyExistsError, NoSpaceError, NotFoundError

_OURS: Final = re.compile(
    r"model(-\d{5,}-of-\d{5,})?\.safetensors|model\.safetensors\.index\.json|values\.json|model\.pt|\.metadata|__0_\d+\.distcp"
)
MARGIN_BYTES: Final = 16 << 20
"""Free space for the file system itself."""


class AtomicTarget(NamedTuple):
    """A folder or a file."""

    path: str
    is_file: bool
    others: re.Pattern[str] | None = None
    """Names of further files that this export may write."""

    @property
    def parent(self) -> str:
        """Its folder."""
        return os.path.dirname(self.path) or "."

    def check(self, *, overwrite: bool) -> None:
        """Rejects a target that cannot be written, before any work.

        Raises:
            NotFoundError: its folder does not exist.
            AlreadyExistsError: it exists, and `overwrite` is false, or it is a link or not an export.
        """
        path = self.path
        if not os.path.isdir(self.parent):
            raise NotFoundError(f"there is no folder {self.parent} to write {os.path.basename(path)} into", object_id=path)
        if not os.path.lexists(path):
            return
        if not overwrite:
            raise AlreadyExistsError(f"{path} already exists: use --force (overwrite=True) to replace it, or another name", object_id=path)
        if os.path.islink(path) or os.path.isdir(path) == self.is_file:
            what = "a link" if os.path.islink(path) else "a folder" if self.is_file else "no folder"
            raise AlreadyExistsError(f"{path} is {what}, which an export does not replace: use another name", object_id=path)
        if not self.is_file:
            with os_errors("list", path):
                others = sorted(name for name in os.listdir(path) if not self._may_write(name) or os.path.isdir(os.path.join(path, name)))
            if others:
                raise AlreadyExistsError(
                    f"{path} holds {others[0]!r}, which no export writes: remove the folder yourself, or use another name", object_id=path
                )

    def _may_write(self, name: str) -> bool:
        return _OURS.fullmatch(name) is not None or (self.others is not None and self.others.fullmatch(name) is not None)


def target_of(path: str | os.PathLike[str], suffixes: tuple[str, ...]) -> AtomicTarget:
    """`path` as a target: one file if its name ends in one of `suffixes`, else a folder."""
    text = local_path(path, "what an export writes")
    text = text.rstrip(os.sep) or text
    return AtomicTarget(text, text.lower().endswith(suffixes))


@contextmanager
def atomic_folder(target: AtomicTarget, *, overwrite: bool) -> Iterator[str]:
    """A new folder next to the target. On success it (or the file in it) is renamed to the target; otherwise it is deleted."""
    target.check(overwrite=overwrite)
    folder = os.path.join(target.parent, f".{os.path.basename(target.path)[:200]}.{secrets.token_hex(6)}.part")
    try:
        with os_errors("write", target.path, target.parent):
            os.mkdir(folder)
        yield folder
        with os_errors("write", target.path, target.parent):
            sync_path(folder)
        target.check(overwrite=overwrite)  # again: another export may have ended meanwhile
        with os_errors("write", target.path, target.parent):
            _publish(folder, target)
            sync_path(target.parent)
    finally:
        _remove(folder)


def _publish(folder: str, target: AtomicTarget) -> None:
    if target.is_file:
        (name,) = os.listdir(folder)
        os.replace(os.path.join(folder, name), target.path)
    elif not os.path.lexists(target.path):
        os.rename(folder, target.path)
    else:
        old = f"{folder}.old"
        os.rename(target.path, old)
        try:
            os.rename(folder, target.path)
        except OSError:
            os.rename(old, target.path)
            raise
        _remove(old)


def require_disk_space(folder: str, needed_bytes: int, path: str) -> None:
    """Checks the free space, before anything is written. Raises `NoSpaceError` if it is too small."""
    with os_errors("write", path, folder):
        disk = shutil.disk_usage(folder)
    if disk.total and needed_bytes + MARGIN_BYTES > disk.free:  # no size: a FUSE filesystem that does not say it
        raise NoSpaceError(
            f"{path} needs {needed_bytes:,} bytes, and {disk.free:,} are free on the disk at {mount_point(folder)}: free space there, "
            "choose another disk, or export a part with --include (select=)",
            object_id=path,
        )


def _remove(folder: str) -> None:
    with suppress(OSError):
        shutil.rmtree(folder)

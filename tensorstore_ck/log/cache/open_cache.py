"""Where a host keeps a cache: a private folder on a local disk, or memory.

Kernels, users and containers never share a cache: LMDB finds dead readers by their process ids, which mean nothing elsewhere. A cache
is never on a network filesystem: LMDB needs coherent memory maps and working locks.
"""

import contextlib
import os
import re
import shutil
import stat
import tempfile
import time
import warnings
from pathlib import Path
from typing import Final

import platformdirs

from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.common.filesystem_kind import NETWORK_FILESYSTEM, filesystem_of
from tensorstore_ck.common.owned_files import FOLDER_MODE, open_own_folder, require_safe_parent
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.errors import PermissionDeniedError
from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.protocol import CacheWarning, Table

_UNUSED_SECONDS: Final = 30 * 24 * 3600


def open_table(cache_dir: Path | None, key: str) -> Table:
    """The host's table for `key`, which is safe in a file name: in `cache_dir` or the user's cache directory, else local tmp, else memory.

    Never fails. Without a cache on disk everything is slower; a `CacheWarning` reports it.
    """
    name = host_key(key)
    user_cache = platformdirs.user_cache_path("tensorstore_ck", appauthor=False) if cache_dir is None else cache_dir
    reasons = []
    for base in (user_cache, Path(tempfile.gettempdir()) / f"tensorstore_ck-{os.getuid()}"):
        try:
            import lmdb  # noqa: PLC0415 - costs nothing where memory is used

            from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table  # noqa: PLC0415
        except ImportError as exc:
            reasons.append(str(exc))
            break
        try:
            folder = private_folder(base, name)
            table = open_lmdb_table(folder)
            _remove_unused(base, name)
            return table
        except (OSError, PermissionDeniedError, lmdb.Error) as exc:
            reasons.append(f"{base}: {exc}")
    warnings.warn(
        CacheWarning(
            f"no cache on a local disk ({'; '.join(reasons)}); using memory, so that every process reads the log again. "
            "Give a private folder on a local filesystem as cache_dir"
        ),
        stacklevel=user_stacklevel(),
    )
    return MemoryTable()


def host_key(key: str) -> str:
    """`key` with this user, boot and PID namespace."""
    return f"{key}-{os.getuid()}-{_boot_id()}-{_pid_namespace()}"


def _boot_id() -> str:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        text = os.uname().nodename  # not Linux
    return re.sub(r"[^A-Za-z0-9]", "", text)


def _pid_namespace() -> str:
    try:
        return re.sub(r"\D", "", os.readlink("/proc/self/ns/pid"))
    except OSError:
        return "0"


def private_folder(base: Path, name: str) -> Path:
    """``base/name``, both made if they are missing; this user's alone, and local. SQLite and LMDB open it by its path.

    Raises:
        PermissionDeniedError: it is another user's, or a link; or others can put another folder in its place.
        OSError: it can be written by others, or is on a network filesystem.
    """
    base.parent.mkdir(parents=True, exist_ok=True)
    require_safe_parent(str(base.parent))
    for folder in (base, base / name):
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=FOLDER_MODE)
        with closing_fd(open_own_folder(str(folder), os.geteuid())) as fd:
            if os.fstat(fd).st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise PermissionError(f"{folder} can be written by others; chmod go-w it")
    kind = filesystem_of(base / name)
    if NETWORK_FILESYSTEM.fullmatch(kind):
        raise OSError(f"it is on a {kind} filesystem, where LMDB is not safe")
    return base / name


def _remove_unused(base: Path, name: str) -> None:
    """Removes unused caches of earlier boots and containers. A process that still uses one continues with its open files."""
    store_and_user = name.rsplit("-", 2)[0]
    with contextlib.suppress(OSError):
        for other in os.listdir(base):
            if other != name and other.startswith(f"{store_and_user}-"):
                with contextlib.suppress(OSError):
                    if (base / other / "data.mdb").stat().st_mtime < time.time() - _UNUSED_SECONDS:
                        shutil.rmtree(base / other, ignore_errors=True)

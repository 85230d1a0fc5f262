"""Which process publishes a staged save: the one that has locked a file of its own for that save, ``claims/<key>``.

The kernel releases the lock when the process ends in any way, except while a child that it forked lives: so the file names the process,
too. A claim keeps two processes from doing the same work. Safety does not depend on it: see gc/PROTOCOL.md.
"""

import fcntl
import json
import os
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from typing import Final

from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.owned_files import FILE_MODE
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.common.processes import Process, has_ended, this_process

CLAIMS: Final = "claims"
_MAX_BYTES: Final = 1 << 12


class Claims:
    """The claims of one open staging folder. Thread-safe."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._held: dict[str, int] = {}
        """Key of a manifest -> the descriptor that holds the lock."""
        weakref.finalize(self, _close, self._held)

    def take(self, key: str) -> bool:
        """Claims the save of a manifest; False if this or another living process has it."""
        with self._lock, os_errors("claim", f"{self._folder.path}/{CLAIMS}/{key}"):
            if key in self._held:
                return False
            self._folder.make_folders(CLAIMS)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fd = os.open(f"{CLAIMS}/{key}", flags, FILE_MODE, dir_fd=self._folder.fd())
            try:
                if not _is_free(fd):
                    os.close(fd)
                    return False
                with suppress(OSError):  # a full disk: the lock suffices, unless this process dies before a child of it
                    holder = json.dumps(this_process()).encode()
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, holder, 0)
            except BaseException:
                os.close(fd)
                raise
            self._held[key] = fd
            return True

    def release(self, key: str) -> None:
        """Ends this process's claim, so that another process can take it; idempotent."""
        with self._lock, suppress(KeyError, OSError):
            os.close(self._held.pop(key))

    def delete(self, key: str) -> None:
        """Ends the claim of a save that is published or dropped; idempotent."""
        with os_errors("delete", key), suppress(FileNotFoundError):
            os.unlink(f"{CLAIMS}/{key}", dir_fd=self._folder.fd())
        self.release(key)

    def delete_others(self, keys: Collection[str]) -> None:
        """Deletes the claims of saves that no longer exist. No other process may use the folder."""
        for path, _ in list(self._folder.files(CLAIMS)):
            if os.path.basename(path) not in keys:
                self.delete(os.path.basename(path))

    def release_all(self) -> None:
        """Ends all claims of this process."""
        with self._lock:
            _close(self._held)


def _close(held: dict[str, int]) -> None:
    while held:
        with suppress(OSError):
            os.close(held.popitem()[1])


def _is_free(fd: int) -> bool:
    """Locks the file; False if its holder may be alive."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        us = this_process()
        holder = _holder(fd)
        return us is not None and holder is not None and has_ended(holder, us)
    return True


def _holder(fd: int) -> Process | None:
    try:
        fields = parse_json(os.pread(fd, _MAX_BYTES, 0))
    except (OSError, ValueError):
        return None
    match fields:
        case [str(host), str(boot_id), str(namespace), int(pid), int(ticks)]:
            return Process(host=host, boot_id=boot_id, pid_namespace=namespace, pid=pid, start_ticks=ticks)
    return None

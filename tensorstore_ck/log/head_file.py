"""A small file in the user's state folder: the highest entry of a store's log that processes of this user have seen.

It is written without fsync, by an atomic rename; only a process that found the expected contents replaces it. An unreadable file counts as
missing. Many ranks of a job may share the folder, over NFS.
"""

import json
import os
import stat
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from tensorstore_ck.common.descriptors import closing_fd
from tensorstore_ck.common.foreign_text import parse_json
from tensorstore_ck.common.ids import DIGEST_BYTES, Digest
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.log.table_rows import Head

_MAX_BYTES: Final = 4096
_MAX_URL_CHARS: Final = 400
_ABANDONED_SECONDS: Final = 60
_MOST_LOOKED_AT: Final = 100
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a planted FIFO must not block us
_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def seen_at(folder: Path, url: str) -> str | None:
    """The key of the store that this user last saw at `url`, if it is among the last ones; without files that others could have written."""
    with suppress(OSError), os.scandir(folder) as entries:
        dated = sorted(((entry.stat().st_mtime_ns, entry.name) for entry in entries), reverse=True)
        for _, name in dated[:_MOST_LOOKED_AT]:
            key = name.removeprefix("head-").removesuffix(".json")
            with suppress(OSError):
                known = HeadFile(folder, key).read_own() if name == f"head-{key}.json" else None
                if known is not None and known.url == url[:_MAX_URL_CHARS]:
                    return key
    return None


class NotOwnError(PermissionError):
    """Another user of the host may have written the file."""


class SeenHead(NamedTuple):
    """The contents of the file."""

    head: Head
    """The highest entry that was seen."""
    accepted_ns: int = 0
    """When a user last accepted a log that had gone back or forked; 0: never."""
    dismissed_n: int = 0
    """The highest entry known then: caches of other hosts may still contain entries up to it."""
    log: str = "log"
    """The prefix of the log."""
    url: str = ""
    """The URL of the store when the entry was seen; empty: unknown."""
    identity: int = 0
    """Of the store's folder then; 0: unknown, or no folder."""


class HeadFile:
    """The file of one store."""

    def __init__(self, folder: Path, key: str) -> None:
        """`key` names the store: it is safe in a file name."""
        self._folder = folder
        self._name = f"head-{key}.json"

    @property
    def path(self) -> Path:
        """Its path."""
        return self._folder / self._name

    def read(self) -> SeenHead | None:
        """Its contents; None if it is missing or damaged, or, with a warning, if others could have written it."""
        try:
            return self.read_own()
        except NotOwnError as exc:
            warnings.warn(f"{exc}: until then a log that goes back or forks is not noticed on this host", stacklevel=user_stacklevel())
        except OSError:
            pass
        return None

    def read_own(self) -> SeenHead | None:
        """Its contents; None if it is missing or damaged.

        Raises:
            OSError: it cannot be read; `NotOwnError` if others could have written it.
        """
        with self._opened(make=False) as folder:
            return self._read(folder)

    def swap(self, old: SeenHead | None, new: SeenHead) -> SeenHead | None:
        """Replaces `old` with `new`, unless the contents differ, or another process is replacing them. Returns the contents afterwards.

        Raises:
            OSError: it cannot be written.
        """
        with self._opened(make=True) as folder:
            contents = self._read(folder)
            if contents != old:
                return contents
            temporary = f"{self._name}.new"
            try:
                file = os.fdopen(os.open(temporary, _NEW, 0o600, dir_fd=folder), "wb")
            except FileExistsError:
                self._remove_abandoned(folder, temporary)
                return contents
            try:
                contents = self._read(folder)  # the temporary is also the lock
                with file:
                    file.write(_encode(new))
                if contents != old:
                    os.unlink(temporary, dir_fd=folder)
                    return contents
                os.rename(temporary, self._name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=folder)
                raise
            return new

    @contextmanager
    def _opened(self, *, make: bool) -> Iterator[int]:
        if make:
            self._folder.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                self._folder.mkdir(mode=0o700)
        with closing_fd(os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)) as folder:
            _require_own(os.fstat(folder), self._folder)
            yield folder

    def _read(self, folder: int) -> SeenHead | None:
        try:
            fd = os.open(self._name, _READ, dir_fd=folder)
        except FileNotFoundError:
            return None
        with closing_fd(fd):
            status = os.fstat(fd)
            _require_own(status, self.path)
            return _decode(os.read(fd, _MAX_BYTES)) if stat.S_ISREG(status.st_mode) else None

    @staticmethod
    def _remove_abandoned(folder: int, temporary: str) -> None:
        with suppress(OSError):
            if os.stat(temporary, dir_fd=folder, follow_symlinks=False).st_mtime < time.time() - _ABANDONED_SECONDS:
                os.unlink(temporary, dir_fd=folder)


def _require_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.getuid():
        raise NotOwnError(f"{path} is not owned by user {os.getuid()}: name another folder with state_dir= or --state-dir")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotOwnError(f"{path} can be written by others: `chmod go-w` it")


def _encode(known: SeenHead) -> bytes:
    head = known.head
    body = {"n": head.n, "hash": head.hash.hex(), "accepted_ns": known.accepted_ns, "dismissed_n": known.dismissed_n, "log": known.log}
    body |= {"url": known.url[:_MAX_URL_CHARS], "inode": known.identity}
    return json.dumps(body).encode() + b"\n"


def _decode(data: bytes) -> SeenHead | None:
    try:
        body = parse_json(data)
        n, accepted_ns, dismissed_n = (body[name] for name in ("n", "accepted_ns", "dismissed_n"))
        digest, log = bytes.fromhex(body["hash"]), body["log"]
        url, identity = body.get("url", ""), body.get("inode", 0)  # earlier builds write none
    except (ValueError, KeyError, TypeError):
        return None
    are_counts = all(type(value) is int and value >= 0 for value in (n, accepted_ns, dismissed_n, identity))
    if not (are_counts and type(log) is type(url) is str and len(digest) == DIGEST_BYTES):
        return None
    return SeenHead(head=Head(n, Digest(digest)), accepted_ns=accepted_ns, dismissed_n=dismissed_n, log=log, url=url, identity=identity)

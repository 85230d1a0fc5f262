"""One host's staging folder of one store: its layout, its size limit, and the order of eviction when it is full.

```
unsent/<name>   objects that are not published yet: durable, never evicted
copies/<name>   objects that the store has as well: a cache, evicted oldest first
uploads/<ulid>  the journal of uploads
staged/<key>    manifests of staged snapshots
claims/<key>    which process publishes that snapshot, locked by it
users           a file that every process that stages here has locked
```

The folder belongs to one user alone (see `PrivateFolder`), even if others may write to the folder above. That user's ranks and jobs on
the host share it without a lock: names are never reused, a move is a rename, and operations may safely happen twice. An object is
durable in the store before it is published here; this module does not know the store.
"""

import contextlib
import os
import shlex
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Final

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.object_names import check_name
from tensorstore_ck.backend.os_errors import os_errors
from tensorstore_ck.backend.protocol import size_if_there
from tensorstore_ck.backend.staging.claims import Claims
from tensorstore_ck.backend.staging.folder_lock import FolderLock
from tensorstore_ck.backend.staging.sparse_files import FileUse, SparseFileCache, files_below
from tensorstore_ck.backend.staging.unsent_file import OpenVerifier, UnsentFile, inode_of, unverified
from tensorstore_ck.backend.staging.upload_journal import JournalEntry, UploadJournal
from tensorstore_ck.common.filesystem_kind import NETWORK_FILESYSTEM, filesystem_of
from tensorstore_ck.common.free_space import Space, writing_to
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.errors import InvalidOptionError, MissingObjectError, NoSpaceError

MAX_MANIFEST_BYTES: Final = 256 << 20
USERS: Final = "users"
_ADVICE: Final = ". Root can publish what an ended job of another user staged: `tsck staging resume --accept-owner UID --staging {}`"
_NOTE_BYTES: Final = 1 << 20


class StagingFolder:
    """The folder of the store `store_uuid` below `path`. The first write, or `check`, makes it."""

    def __init__(
        self, path: str | os.PathLike[str], store_uuid: str, capacity_bytes: int, open_verifier: OpenVerifier = unverified
    ) -> None:
        """`capacity_bytes`: how much of the disk objects and copies together may use.

        `open_verifier` opens what verifies the bytes of unpublished objects before they leave this folder.

        Raises:
            InvalidOptionError: the capacity is not above 0.
        """
        if capacity_bytes <= 0:
            raise InvalidOptionError(f"a staging folder's capacity must be more than 0 bytes, not {capacity_bytes}", object_id="staging")
        self.path = f"{os.path.abspath(os.path.expanduser(path))}/{check_name(store_uuid)}"
        self.capacity_bytes = capacity_bytes
        self.open_verifier = open_verifier
        self._private = PrivateFolder(self.path, _ADVICE.format(shlex.quote(os.path.abspath(os.path.expanduser(path)))))
        self.unsent = LocalBackend("unsent", within=self._private)
        self.copies = SparseFileCache(self._private)
        self._root = LocalBackend(".", within=self._private)
        self.journal = UploadJournal(self._root)
        self._claims = Claims(self._private)
        self._lock: FolderLock | None = None

    def check(self) -> None:
        """Makes the folder, and checks that it can be used.

        Raises:
            InvalidOptionError: it is on a network filesystem, or cannot be a folder.
            PermissionDeniedError: this user may not write there, or something there is not this user's alone.
            NoSpaceError: the disk has less free space than its capacity.
        """
        kind = filesystem_of(Path(self.path))
        if NETWORK_FILESYSTEM.fullmatch(kind):
            raise InvalidOptionError(
                f"the staging folder {self.path} is on a {kind} filesystem, and must be on a disk of this host: name another folder",
                object_id=self.path,
            )
        with writing_to(self.path, "the staging folder"):
            os.close(self._private.open_nameless())
        space, used = self._root.space(), self.used_bytes()
        if space is not None and space.free_bytes + used < self.capacity_bytes:
            raise NoSpaceError(
                f"the staging folder {self.path} may use {human_bytes(self.capacity_bytes)}, and uses {human_bytes(used)}, but only "
                f"{human_bytes(space.free_bytes)} of its disk's {human_bytes(space.total_bytes)} are free: free space there, or lower "
                "its capacity",
                object_id=self.path,
            )

    def enter(self, sweep: Callable[[], object]) -> None:
        """Marks the folder as in use until `leave`; calls `sweep` first if no other process uses it."""
        if self._lock is None:
            self._lock = FolderLock(self._private, USERS, sweep)

    def leave(self) -> None:
        """Ends this process's use of the folder; idempotent."""
        lock, self._lock = self._lock, None
        if lock is not None:
            lock.end()
        self._claims.release_all()
        self._private.close()

    def orphans(self, named: Collection[str]) -> list[str]:
        """The unpublished objects, and those whose upload was begun, other than `named`."""
        found = {info.name for info in self.unsent.list("")} | set(self.journal.names())
        return sorted(found - set(named))

    def drop_temporaries(self) -> None:
        """Deletes the leftovers of interrupted writes, and claims without a manifest. No other process may use the folder."""
        for info in self._root.list_uploads():
            self._root.abort_upload(info.name)
        self._claims.delete_others(self.list_manifests())

    def space(self) -> Space | None:
        """The free space of its disk."""
        return self._root.space()

    def used_bytes(self) -> int:
        """How much of the disk objects and copies use now."""
        with os_errors("look at", self.path):
            return _sum(self.copies.files()) + self.unsent_bytes()

    def unsent_bytes(self) -> int:
        """How much of the disk the unpublished objects use."""
        return _sum(files_below(self._private, "unsent"))

    def evict(self, needed_bytes: int) -> int:
        """Deletes copies, the oldest first, until `needed_bytes` more fit; returns how many bytes that freed.

        Raises:
            NoSpaceError: evicting all copies would not be enough; none is evicted.
        """
        with os_errors("free space in", self.path):
            copies, unsent = sorted(self.copies.files()), self.unsent_bytes()
        kept = _sum(copies)
        space = self._root.space()
        free = self.capacity_bytes if space is None else space.free_bytes
        shortfall = max(unsent + kept + needed_bytes - self.capacity_bytes, needed_bytes - free)
        if shortfall > kept:
            raise NoSpaceError(
                f"{human_bytes(needed_bytes)} more do not fit into the staging folder {self.path}: {human_bytes(unsent)} of its "
                f"{human_bytes(self.capacity_bytes)} wait to be published, and its disk has {human_bytes(free)} free and "
                f"{human_bytes(kept)} of copies; wait for the uploads, free space on the disk, or raise the capacity",
                object_id=self.path,
            )
        freed = 0
        for copy in copies:
            if freed >= shortfall:
                break
            with os_errors("evict", copy.path), contextlib.suppress(FileNotFoundError):
                os.unlink(copy.path, dir_fd=self._private.fd())
            freed += copy.used_bytes
        return freed

    def publish(self, names: Iterable[str]) -> None:
        """Turns unpublished objects, which are now durable in the store and named there, into copies. Idempotent."""
        names = list(names)
        for name in names:
            entry = self.journal.read(name)
            source, target = f"unsent/{check_name(name)}", self.copies.path(name if entry is None else entry.store_name)
            try:
                with os_errors("publish", name), contextlib.suppress(FileNotFoundError):
                    os.utime(source, dir_fd=self._private.fd(), follow_symlinks=False)
                    self._private.make_folders(os.path.dirname(target))
                    os.rename(source, target, src_dir_fd=self._private.fd(), dst_dir_fd=self._private.fd())
            except NoSpaceError:  # a copy is only a cache
                self.unsent.delete([name])
        # Without a journal entry an upload counts as never begun: so first make sure that no object is left to upload.
        for name in {os.path.dirname(name): name for name in names}.values():
            with contextlib.suppress(MissingObjectError):
                self.unsent.sync_folders(name)
        self.journal.delete(names)

    def write_manifest(self, key: str, data: bytes) -> None:
        """Writes or replaces a manifest, atomically and durably. This process publishes it: see `claim`."""
        self.claim(key)
        self._root.replace(f"staged/{key}", data)

    def read_manifest(self, key: str) -> bytes:
        """The bytes of a manifest.

        Raises:
            MissingObjectError: there is none.
        """
        return self._root.get(f"staged/{key}", max_bytes=MAX_MANIFEST_BYTES)

    def list_manifests(self) -> list[str]:
        """The keys of all manifests, sorted: those of ULIDs by time."""
        return sorted(info.name.removeprefix("staged/") for info in self._root.list("staged/"))

    def delete_manifest(self, key: str) -> None:
        """Deletes a manifest, if it is there."""
        self._root.delete([f"staged/{key}"])
        self._claims.delete(key)

    def claim(self, key: str) -> bool:
        """Whether this process may continue the save of that manifest, from now on until `release` or `leave`.

        False if a living process, which may be this one, has claimed it: that process will publish it.
        """
        try:
            return self._claims.take(key)
        except NoSpaceError:  # what is staged must be published for all that, or the disk would stay full
            return True

    def release(self, key: str) -> None:
        """Leaves the save of a manifest to other processes."""
        self._claims.release(key)

    def note(self, entry: JournalEntry) -> None:
        """Writes a journal entry, evicting copies if needed: otherwise a full disk would never become empty."""
        try:
            self.journal.write(entry)
        except NoSpaceError:
            if not self.evict(_NOTE_BYTES):
                raise
            self.journal.write(entry)

    def open_unsent(self, name: str) -> UnsentFile:
        """An object to upload.

        Raises:
            MissingObjectError: it is not here, or no longer.
        """
        with os_errors("read", name):
            path, flags = f"unsent/{check_name(name)}", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
            return UnsentFile(
                fd=os.open(path, flags, dir_fd=self._private.fd()),
                name=name,
                folder=self.path,
                inode=partial(self._inode, path),
                open_verifier=self.open_verifier,
            )

    def has_unsent(self, name: str) -> bool:
        """Whether an unpublished object is here."""
        return size_if_there(self.unsent, name) is not None

    def _inode(self, path: str) -> tuple[int, int] | None:
        try:
            return inode_of(os.stat(path, dir_fd=self._private.fd(), follow_symlinks=False))
        except FileNotFoundError:
            return None


def _sum(files: Iterable[FileUse]) -> int:
    return sum(file.used_bytes for file in files)

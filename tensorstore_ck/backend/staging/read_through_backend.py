"""A store's backend that reads objects from the staging folder if they are there, else from the store, and keeps a copy. In a restore of
several hosts it reads what only their folders have from there.

Everything else goes to the store. Only immutable objects are kept: never log entries, checkpoints or store.json. Readers verify the
bytes, and call `distrust` on wrong ones, since a disk may corrupt them. The folder never makes a read fail: objects that cannot be read
there come from the store, objects that cannot be kept are not. `size` asks the store for published objects: writers learn from it that
the store still has the objects that they rely on.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Final, Protocol

from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.protocol import Backend, size_if_there
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.backend.staging.sparse_files import GRAIN_BYTES
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.errors import MissingObjectError, StoreError

KEPT_FOLDERS: Final = ("packs/", "parts/", "snapshots/", "moved/")
LOT_BYTES: Final = 64 << 20
"""A process reserves space in lots of this size. Each process may exceed the folder's capacity by one lot."""
FETCH_BYTES: Final = 16 << 20
"""Bytes that are fetched and kept at once."""
REMEMBERED_OBJECTS: Final = 1024
"""Of the last objects that a thread read from other hosts: more than the packs that one block with its delta bases usually needs."""


class OtherFolders(Protocol):
    """The staging folders of other hosts."""

    def read_into(self, name: str, offset: int, target: memoryview, /) -> Callable[[], object] | None:
        """Fills `target` with bytes of an object if one of them has it.

        Returns the function to call if these bytes are wrong: the folder that they came from is not asked for the object again. None if
        no folder has it.
        """

    def has(self, name: str, /) -> bool:
        """Whether one of them is said to have an object."""


class ReadThroughBackend(ForwardingBackend):
    """The backend `store`, read through `folder`."""

    def __init__(self, folder: StagingFolder, store: Backend) -> None:
        super().__init__(store)
        self.folder = folder
        self.store = store
        self._quota = _SpaceQuota(folder)
        self._of_thread = _OfThread()
        self._distrusted: set[str] = set()
        """Objects that are not read from this folder any more."""
        self._distrusting = threading.Lock()
        self.others: list[OtherFolders] = []
        """Asked before the store, while a restore of several hosts runs."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        self._of_thread.distrust_host.pop(name, None)
        if not self._reads_locally(name):
            return self.store.get(name, max_bytes=max_bytes)
        fault = None
        try:
            return self.folder.unsent.get(name, max_bytes=max_bytes)
        except MissingObjectError:
            pass
        except StoreError as exc:
            fault = exc
        with contextlib.suppress(OSError):
            copy = self.folder.copies.get(name)
            if copy is not None and len(copy) <= max_bytes:
                return copy
        with _instead_of(fault):
            data = self.store.get(name, max_bytes=max_bytes)
        if self._quota.take(len(data)):
            with contextlib.suppress(OSError, StoreError):
                self.folder.copies.keep(name, data)
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._of_thread.distrust_host.pop(name, None)
        if not self._reads_locally(name):
            if not self._read_from_others(name, offset, target):
                self.store.read_into(name, offset, target)
            return
        fault = None
        try:
            self.folder.unsent.read_into(name, offset, target)
        except MissingObjectError:
            pass
        except StoreError as exc:
            fault = exc
        else:
            return
        with contextlib.suppress(OSError):
            if self.folder.copies.read_into(name, offset, target):
                return
        if self._read_from_others(name, offset, target):
            return
        with _instead_of(fault):
            size_bytes = self._size_to_keep(name, len(target))
            for start in range(0, len(target), FETCH_BYTES):
                self._fetch(name, size_bytes, offset + start, target[start : start + FETCH_BYTES])

    def size(self, name: str) -> int:
        if self._reads_locally(name):
            with contextlib.suppress(StoreError):
                return self.folder.unsent.size(name)
        return self.store.size(name)

    def distrust(self, name: str) -> bool:
        """The bytes that this thread read last for `name` were wrong: whether to read them again, since they now come from elsewhere.

        Only the source of these bytes is given up. Another host is not asked for the object again. A wrong copy in this folder is
        deleted, and this process keeps no further copy of the object; a staged file is given up if another host or the store has the
        object. If another thread gave the source up before, nothing else changes.

        Returns:
            False if no other source has the object: then there are no other bytes.

        Raises:
            BackendUnavailableError: the store does not say whether it has it.
        """
        if not name.startswith(KEPT_FOLDERS):
            return False
        distrust_host = self._of_thread.distrust_host.pop(name, None)
        if distrust_host is not None:
            distrust_host()
            return self._is_elsewhere(name)
        with self._distrusting:
            return self._is_elsewhere(name) if name in self._distrusted else self._distrust_own(name)

    def replace(self, name: str, data: Buffer) -> None:
        self.store.replace(name, data)
        self._forget(name)

    def delete(self, names: Iterable[str]) -> None:
        self.store.delete(map(self._forget, names))

    def close(self) -> None:
        self.folder.leave()
        self.store.close()

    def _reads_locally(self, name: str) -> bool:
        return name.startswith(KEPT_FOLDERS) and name not in self._distrusted

    def _read_from_others(self, name: str, offset: int, target: memoryview) -> bool:
        for other in self.others:
            distrust_host = other.read_into(name, offset, target)
            if distrust_host is not None:
                self._of_thread.remember(name, distrust_host)
                return True
        return False

    def _distrust_own(self, name: str) -> bool:
        """Gives up what this folder has of an object; returns False if nobody else has it."""
        try:
            unsent_bytes = self.folder.unsent.size(name)
        except StoreError:
            with contextlib.suppress(OSError):
                self.folder.copies.drop(name)
        else:
            if not self._others_have(name):
                entry = self.folder.journal.read(name)
                if entry is None or not entry.is_complete or size_if_there(self.store, name) != unsent_bytes:
                    return False
                self.folder.unsent.delete([name])
        self._distrusted.add(name)
        return True

    def _is_elsewhere(self, name: str) -> bool:
        return self._others_have(name) or size_if_there(self.store, name) is not None

    def _others_have(self, name: str) -> bool:
        return any(other.has(name) for other in self.others)

    def _forget(self, name: str) -> str:
        if name.startswith(KEPT_FOLDERS):
            with contextlib.suppress(OSError):
                self.folder.copies.drop(name)
        return name

    def _size_to_keep(self, name: str, range_bytes: int) -> int:
        """The object's size, which its sparse copy needs; 0 if a range of that length cannot be kept."""
        with contextlib.suppress(OSError):
            copies = self.folder.copies
            if copies.keeps_ranges and self._quota.take(range_bytes + 2 * GRAIN_BYTES):
                return copies.size(name) or self.store.size(name)
        return 0

    def _fetch(self, name: str, size_bytes: int, offset: int, target: memoryview) -> None:
        """Reads a range; if the size of its object is given, reads whole grains and keeps them."""
        end = offset + len(target)
        first, last = offset - offset % GRAIN_BYTES, min(-(-end // GRAIN_BYTES) * GRAIN_BYTES, size_bytes)
        if last < end:
            self.store.read_into(name, offset, target)
            return
        grains = self._of_thread.memory(last - first)
        self.store.read_into(name, first, grains)
        target[:] = grains[offset - first : end - first]
        with contextlib.suppress(OSError, StoreError):
            self.folder.copies.keep_range(name, size_bytes, first, grains)


class _OfThread(threading.local):
    """What one thread reads into, and which hosts its bytes came from."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self.distrust_host: dict[str, Callable[[], object]] = {}
        """Of objects whose last bytes came from another host; the oldest first."""

    def memory(self, size_bytes: int) -> memoryview:
        """Of that size; the next call returns the same."""
        if len(self._buffer) < size_bytes:
            self._buffer = bytearray(size_bytes)
        return memoryview(self._buffer)[:size_bytes]

    def remember(self, name: str, distrust_host: Callable[[], object]) -> None:
        """Notes where the bytes of an object came from, and forgets the oldest note above `REMEMBERED_OBJECTS`."""
        self.distrust_host.pop(name, None)
        self.distrust_host[name] = distrust_host
        if len(self.distrust_host) > REMEMBERED_OBJECTS:
            del self.distrust_host[next(iter(self.distrust_host))]


class _SpaceQuota:
    """How much may still be kept: the folder grants or refuses a lot of bytes at a time."""

    def __init__(self, folder: StagingFolder) -> None:
        self._folder = folder
        self._lot_bytes = min(LOT_BYTES, folder.capacity_bytes // 16)
        self._lock = threading.Lock()
        self._left_bytes = 0
        self._is_granted = False

    def take(self, size_bytes: int) -> bool:
        """Whether that many bytes may be kept."""
        with self._lock:
            if self._left_bytes < size_bytes:
                self._left_bytes = max(size_bytes, self._lot_bytes)
                self._is_granted = False
                with contextlib.suppress(StoreError):
                    self._folder.evict(self._left_bytes)
                    self._is_granted = True
            self._left_bytes -= size_bytes
            return self._is_granted


@contextlib.contextmanager
def _instead_of(fault: StoreError | None) -> Iterator[None]:
    """Wraps a read from the store that a `fault` of the staged object made necessary: raises the fault if the store lacks the object."""
    try:
        yield
    except MissingObjectError:
        if fault is not None:
            raise fault from None
        raise

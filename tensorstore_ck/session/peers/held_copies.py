"""The files that a rank keeps for others: for which snapshots, and when they are deleted. Thread-safe.

A file is written under its final name, and counts once it is durable and verified; a manifest is written when all files of its snapshot
count. Incomplete copies are deleted, and only files that this rank wrote for a peer.
"""

import threading
from collections.abc import Mapping
from itertools import filterfalse

from tensorstore_ck.backend.staging import StagingFolder
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.errors import CorruptObjectError


class HeldCopies:
    """The files of other ranks in a staging folder."""

    def __init__(self, folder: StagingFolder) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._named: dict[Ulid, dict[str, frozenset[str]]] = {}
        """Snapshot -> manifest -> the objects that it names."""
        self._durable: dict[str, int] = {}
        """Durable and verified objects, and their sizes."""
        self._complete: set[str] = set()
        """The complete manifests."""

    def expect(self, txn: Ulid) -> None:
        """Notes that copies of a snapshot will come; it may be forgotten from now on, also before they do."""
        with self._lock:
            self._named.setdefault(txn, {})

    def begin(self, txn: Ulid, key: str, sizes: Mapping[str, int]) -> list[str]:
        """Holds these objects for a manifest, unless the snapshot was forgotten; returns the missing ones.

        Raises:
            CorruptObjectError: one exists with another size.
        """
        with self._lock:
            wrong = next((name for name, size in sizes.items() if self._durable.get(name, size) != size), None)
            if wrong is not None:
                raise CorruptObjectError(f"{wrong} was sent before with {self._durable[wrong]} bytes, not {sizes[wrong]}", object_id=wrong)
            if txn in self._named:
                self._named[txn][key] = frozenset(sizes)
            return list(filterfalse(self._durable.__contains__, sizes))

    def add(self, name: str, size_bytes: int) -> None:
        """Notes that an object is durable and verified."""
        with self._lock:
            self._durable[name] = size_bytes

    def complete(self, txn: Ulid, key: str, manifest: bytes) -> bool:
        """Writes a manifest whose objects are complete, unless the snapshot was forgotten meanwhile."""
        with self._lock:
            if key not in self._named.get(txn, {}):
                return False
            self._folder.write_manifest(key, manifest)
            self._complete.add(key)
            return True

    def end(self, txn: Ulid, key: str) -> None:
        """Ends the copy: drops it if its manifest is not complete."""
        with self._lock:
            if key not in self._complete:
                self._named.get(txn, {}).pop(key, None)
                self._sweep()

    def forget(self, txn: Ulid) -> None:
        """Deletes the copies of a snapshot."""
        with self._lock:
            for key in self._named.get(txn, {}):
                self._folder.delete_manifest(key)
                self._complete.discard(key)
            self._named.pop(txn, None)
            self._sweep()

    def _sweep(self) -> None:
        named: set[str] = set().union(*(names for objects_of in self._named.values() for names in objects_of.values()))
        unneeded = [name for name in self._durable if name not in named]
        self._folder.unsent.delete(unneeded)
        for name in unneeded:
            del self._durable[name]

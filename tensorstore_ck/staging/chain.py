"""What one store handle has staged on a ref and not published yet, oldest first: the next put builds on it. Thread-safe."""

import threading
from collections.abc import Mapping
from typing import NamedTuple

from tensorstore_ck.ids import Digest, Ulid
from tensorstore_ck.index import Location
from tensorstore_ck.pack import pack_name
from tensorstore_ck.partwriter import Known
from tensorstore_ck.staging.manifest import Accepts
from tensorstore_ck.writer import Anything, Expected


class _Link(NamedTuple):
    txn: Ulid
    root: Digest
    added: Mapping[Digest, Location]
    """Where the blocks lie that it brought."""
    names: frozenset[str]


class StagedChain:
    """The staged puts of one ref."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[_Link] = []

    def add(self, txn: Ulid, root: Digest, added: Mapping[Digest, Location], names: frozenset[str]) -> None:
        """Another one was staged."""
        with self._lock:
            self._links.append(_Link(txn, root, added, names))

    def remove(self, txn: Ulid) -> None:
        """It is published, or given up."""
        with self._lock:
            self._links = [link for link in self._links if link.txn != txn]

    def accepts(self, expect: Expected) -> Accepts:
        """Where the ref may be when the next one is published: those before it may each be published by then, or given up."""
        if isinstance(expect, Anything):
            return expect
        with self._lock:
            return (expect, *(link.root for link in self._links))

    def last_root(self) -> Digest | None:
        """The newest of them."""
        with self._lock:
            return self._links[-1].root if self._links else None

    def location(self, block: Digest) -> Location | None:
        """Where a block of any of them lies."""
        with self._lock:
            return next((link.added[block] for link in self._links if block in link.added), None)

    def needed(self, but: Ulid) -> frozenset[str]:
        """The objects that the others name."""
        with self._lock:
            return frozenset().union(*(link.names for link in self._links if link.txn != but))


class ChainedBlocks:
    """Where blocks lie already: among what is staged on this host, else as `known` says; and which staged packs that relies on."""

    def __init__(self, chain: StagedChain, known: Known) -> None:
        self._chain = chain
        self._known = known
        self.packs: set[str] = set()

    def __call__(self, block: Digest) -> Location | None:
        """Where a block lies, if it may be relied on. Called under its caller's lock."""
        found = self._chain.location(block)
        if found is None:
            return self._known(block)
        self.packs.add(pack_name(found.pack))
        return found

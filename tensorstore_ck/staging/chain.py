"""What one store handle has staged on a ref and not published yet, oldest first: the next put builds on it. Thread-safe."""

import threading
from collections.abc import Iterable, Mapping
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
    accepts: tuple[Digest | None, ...] | None
    """Where it may find the ref; None if an earlier process staged it."""


class StagedChain:
    """The staged puts of one ref."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: list[_Link] = []

    def add(self, txn: Ulid, root: Digest, added: Mapping[Digest, Location], names: frozenset[str], accepts: Accepts) -> None:
        """This handle has staged another one."""
        with self._lock:
            self._links.append(_Link(txn, root, added, names, () if isinstance(accepts, Anything) else accepts))

    def add_found(self, txn: Ulid, root: Digest, names: Iterable[str]) -> None:
        """An earlier process has staged it."""
        with self._lock:
            self._links.append(_Link(txn, root, {}, frozenset(names), None))

    def remove(self, txn: Ulid) -> None:
        """It is published, or given up."""
        with self._lock:
            self._links = [link for link in self._links if link.txn != txn]

    def accepts(self, expect: Expected, parent: Digest | None) -> Accepts:
        """Where the ref may be when the next one is published: those before it may each be published by then, or given up.

        What an earlier process staged is accepted only where this one goes on from it: `parent`.
        """
        if isinstance(expect, Anything):
            return expect
        with self._lock:
            roots = [link.root for link in self._links]
            found = [roots[: at + 1] for at, link in enumerate(self._links) if link.root == parent and link.accepts is None]
            own = [root for link in self._links if link.accepts is not None for root in (*link.accepts, link.root)]
        return tuple(dict.fromkeys([expect, *own, *(found[-1] if found else [])]))

    def txns(self) -> list[Ulid]:
        """Their transactions."""
        with self._lock:
            return [link.txn for link in self._links]

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

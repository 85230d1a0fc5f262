"""The saves that one store handle has staged on a ref and not published yet. The next save builds on them. Thread-safe; see `RefFence`.

A save borrows the chain before it looks up the ref: so a snapshot that is published meanwhile is in one of the two, and one that is given
up meanwhile keeps its files.
"""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.reachability import BlockLocations, chain_of
from tensorstore_ck.engine.write.part_writer import BlockLookup
from tensorstore_ck.engine.write.request import AnyHead, Expected
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import Part
from tensorstore_ck.log.block_index import Location
from tensorstore_ck.session.staging.manifest import Accepts


class StagedLink(NamedTuple):
    """A staged save."""

    txn: Ulid
    root: Digest
    added: Mapping[Digest, Location]
    """The locations of its new blocks."""
    names: frozenset[str]
    accepts: tuple[Digest | None, ...] | None
    """The roots at which the ref may be; None if an earlier process staged it."""


class StagedLinks:
    """Staged saves, oldest first."""

    def __init__(self, links: Iterable[StagedLink], restored: Digest | None = None) -> None:
        """`restored`: what this process last restored or staged on the ref."""
        self._links = tuple(links)
        self._restored = restored

    @property
    def txns(self) -> list[Ulid]:
        """Their transactions."""
        return [link.txn for link in self._links]

    @property
    def names(self) -> frozenset[str]:
        """Their objects."""
        return frozenset().union(*(link.names for link in self._links))

    def accepts(self, expect: Expected) -> Accepts:
        """The roots at which the ref may be when the next save is published: each of these saves may be published or given up by then.

        A save of an earlier process counts only if this process has restored it.
        """
        if isinstance(expect, AnyHead):
            return expect
        roots = [link.root for link in self._links]
        restored = [roots[: at + 1] for at, link in enumerate(self._links) if link.root == self._restored and link.accepts is None]
        own = [root for link in self._links if link.accepts is not None for root in (*link.accepts, link.root)]
        return tuple(dict.fromkeys([expect, *own, *(restored[-1] if restored else [])]))

    def location(self, block: Digest) -> Location | None:
        """The location of a block of one of these saves."""
        return next((link.added[block] for link in self._links if block in link.added), None)


class UnpublishedSave(Protocol):
    """A staged save that is neither published nor given up."""

    @property
    def is_alone(self) -> bool:
        """Whether this process can publish it without other ranks."""

    def publish_before(self, later: Any, /) -> None:
        """Publishes it, so that the `later` save can go on."""


class StagedChain:
    """The staged saves of one ref."""

    def __init__(self, restored: Callable[[], Digest | None] = lambda: None, lock: "threading.Lock | None" = None) -> None:
        """`restored`: see `StagedLinks`; called under the lock."""
        self._restored = restored
        self._lock = lock or threading.Lock()
        self._links: list[StagedLink] = []
        self._borrowed: list[StagedLinks] = []
        self._unpublished: list[UnpublishedSave] = []

    def line_up(self, save: UnpublishedSave) -> None:
        """Makes later saves of this handle to the ref wait for this one."""
        with self._lock:
            self._unpublished.append(save)

    def leave(self, save: UnpublishedSave) -> None:
        """Removes a save from the line, once it is published or given up. Idempotent."""
        with self._lock:
            self._unpublished = list(filter(lambda each: each is not save, self._unpublished))

    def unpublished(self, before: UnpublishedSave | None = None) -> list[UnpublishedSave]:
        """The saves that are neither published nor given up, oldest first. With `before`, only those before that save; none if it is not
        among them.
        """
        with self._lock:
            at = next((number for number, each in enumerate(self._unpublished) if each is before), 0 if before is not None else None)
            return self._unpublished[:at]

    def add(self, link: StagedLink) -> None:
        """Adds a save that was staged, or found."""
        with self._lock:
            self._links.append(link)

    def remove(self, txn: Ulid) -> None:
        """Removes a save that is published or given up."""
        with self._lock:
            self._links = list(filter(lambda link: link.txn != txn, self._links))

    def borrow(self) -> StagedLinks:
        """The saves on which the next one builds; see `give_back`."""
        with self._lock:
            self._borrowed.append(StagedLinks(self._links, self._restored()))
            return self._borrowed[-1]

    def give_back(self, links: StagedLinks) -> None:
        """Ends a `borrow`: that save is staged, or failed. Idempotent."""
        with self._lock:
            self._borrowed = list(filter(lambda each: each is not links, self._borrowed))

    def needed(self, but: Ulid) -> frozenset[str]:
        """The objects that other saves need, or may come to need."""
        with self._lock:
            others = StagedLinks(link for link in self._links if link.txn != but)
            return others.names.union(*(links.names for links in self._borrowed))


class ChainedBlocks:
    """Looks blocks up in the saves that are staged on this host, then in `known`. Collects the staged packs on which the save relies."""

    def __init__(self, links: StagedLinks, known: BlockLookup | None) -> None:
        self._links = links
        self._known = known
        self.packs: set[str] = set()

    @property
    def parts(self) -> Sequence[tuple[Part, BlockLocations]]:
        """See `BlockLookup`."""
        return self._known.parts if self._known is not None else ()

    def find(self, blocks: Sequence[Digest]) -> dict[Digest, Location]:
        """See `BlockLookup`. Called under its caller's lock."""
        located = ((block, self._links.location(block)) for block in blocks)
        staged = {block: location for block, location in located if location is not None}
        for location in staged.values():
            # Its delta bases may lie in packs of the shared base snapshot; those are in the store.
            self.packs |= {pack_name(place.pack) for place in chain_of(location)} & self._links.names
        others = [block for block in blocks if block not in staged]
        return {**staged, **self._known.find(others)} if self._known is not None and others else staged

"""Packs for fsck and salvage: the listed packs, their footers, and the blocks that are known to be bad.

Hashes cover every byte of a pack, so reading header, footer and blocks (check_data.py) finds any damage. The cache of footers is
bounded, so memory does not grow with the number of packs.

Tables of blocks, as parts name them, replace the footers of packs that cannot be trusted. They have gaps: a row with ``raw`` 0 is absent.
"""

import contextlib
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.byte_cache import ByteCache
from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid, block_id, parse_ulid
from tensorstore_ck.common.threads import REMOTE_THREADS, for_each
from tensorstore_ck.engine.reachability import chain_of
from tensorstore_ck.engine.read.block_reader import decode_at
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.pack import ENTRY_DTYPE, Entries, Footer, pack_name
from tensorstore_ck.format.part import Extents
from tensorstore_ck.gc.compact import read_footer
from tensorstore_ck.gc.listing import ListedObject
from tensorstore_ck.log.block_index import Location
from tensorstore_ck.maintenance.fsck.findings import UNREADABLE, kind_of, require_reachable

FOOTER_CACHE_BYTES: Final = 64 << 20


class PackProblem(NamedTuple):
    """Why a pack's footer cannot be used."""

    kind: str
    message: str


@dataclass(slots=True)
class BadBlocks:
    """Damaged blocks of one pack; of kind ``unreadable`` if any of them could not be read."""

    entries: set[int] = field(default_factory=set)
    message: str = ""
    kind: str = "corrupt_object"


Links = tuple[tuple[Ulid, int], ...]


def links_of(place: Location) -> Links:
    """(pack, offset) of a block and of all that it is a difference to."""
    return tuple((link.pack, link.offset) for link in chain_of(place))


class Packs:
    """The packs of a store. Thread-safe."""

    def __init__(self, backend: Backend, listed: dict[Ulid, ListedObject]) -> None:
        self._backend = backend
        self.listed = listed
        self.problems: dict[Ulid, PackProblem] = {}
        """Packs whose header or footer was found damaged."""
        self.bad: dict[Ulid, BadBlocks] = {}
        """Blocks that were found damaged."""
        self.blocks = 0
        """Blocks in the footers that `check_footers` read."""
        self._footers = ByteCache[Ulid, Footer](lambda: FOOTER_CACHE_BYTES, lambda footer: footer.entries.nbytes)
        self._single: dict[tuple[bytes, Links], bool] = {}
        self._lock = threading.Lock()

    def footer(self, pack: Ulid) -> Footer | PackProblem:
        """The footer of a pack, or why it is unusable."""
        known = self._footers.get(pack) or self.problems.get(pack)
        if known is not None:
            return known
        listed = self.listed.get(pack)
        try:
            size_bytes = listed.size_bytes if listed is not None else self._backend.size(pack_name(pack))
            footer = read_footer(self._backend, pack, size_bytes)
        except StoreError as exc:
            require_reachable(self._backend, exc)
            problem = PackProblem(kind_of(exc), str(exc))
            with self._lock:
                return self.problems.setdefault(pack, problem)
        self._footers.put(pack, footer)
        return footer

    def footers(self) -> Iterator[tuple[Ulid, Footer]]:
        """Every listed pack with a sound footer, in order; notes the others' problems."""
        for pack in sorted(self.listed):
            footer = self.footer(pack)
            if isinstance(footer, Footer):
                yield pack, footer

    def look_again(self) -> list[Ulid]:
        """Reads the footers with problems again, and returns the packs that have none now.

        A pack may have been listed while it was written, and be in use by now.
        """
        sound = []
        self._single.clear()
        for pack in [*self.problems]:
            del self.problems[pack]
            if pack in self.listed:
                with contextlib.suppress(StoreError):  # the footer's error says more
                    self.listed[pack] = self.listed[pack]._replace(size_bytes=self._backend.size(pack_name(pack)))
            if isinstance(self.footer(pack), Footer) and pack in self.listed:
                sound.append(pack)
        return sound

    def check_footers(self) -> None:
        """Reads every listed pack's header and footer."""
        for_each(sorted(self.listed), lambda pack: self._count(self.footer(pack)), 1 if self._backend.is_local else REMOTE_THREADS)

    def note_bad(self, pack: Ulid, entry: int, kind: str, message: str) -> None:
        """Notes a damaged or unreadable block."""
        with self._lock:
            bad = self.bad.setdefault(pack, BadBlocks())
            bad.entries.add(entry)
            if not bad.message or (kind == UNREADABLE != bad.kind):
                bad.kind, bad.message = kind, message

    def unread(self, names: Collection[str]) -> list[Ulid]:
        """The listed packs with these names that have no known damaged block."""
        named = {ulid for name in names if (ulid := parse_ulid(name[-26:])) is not None and pack_name(ulid) == name}
        return sorted((named & self.listed.keys()) - self.bad.keys())

    def is_intact(self, place: Location, block: bytes) -> bool:
        """Whether a block, and what it is a difference to, can be read where a part says; for packs without a usable footer."""
        key = block, links_of(place)
        if key not in self._single:
            try:
                self._single[key] = block_id(decode_at(self._backend, place)) == block
            except StoreError as exc:
                require_reachable(self._backend, exc)
                self._single[key] = False
                if kind_of(exc) == UNREADABLE:
                    with self._lock:
                        self.problems[place.pack] = PackProblem(UNREADABLE, str(exc))
        return self._single[key]

    def _count(self, footer: Footer | PackProblem) -> None:
        if isinstance(footer, Footer):
            with self._lock:
                self.blocks += len(footer.entries)


Ids = npt.NDArray[np.uint8]
"""One row of 32 bytes per block."""

_SHARED: Final = ("offset", "stored", "raw", "codec")


class BlockCopy(NamedTuple):
    """A copy of a block, according to a footer."""

    pack: Ulid
    entry: int
    row: Entries
    """One row of the footer."""


class BlockTables:
    """Pack -> rows of its blocks, by entry. Not thread-safe."""

    def __init__(self) -> None:
        self.packs: dict[Ulid, Entries] = {}

    def add(self, pack: Ulid, extents: Extents, ids: Ids) -> None:
        """Adds a part's blocks in a pack."""
        if not len(extents):
            return
        rows, size = self.packs.get(pack, np.zeros(0, ENTRY_DTYPE)), int(extents["entry"].max()) + 1
        if len(rows) < size:
            rows = self.packs[pack] = np.concatenate((rows, np.zeros(size - len(rows), ENTRY_DTYPE)))
        entries = extents["entry"]
        for column in _SHARED:
            rows[column][entries] = extents[column]
        rows["id"][entries] = np.ascontiguousarray(ids).view(ENTRY_DTYPE["id"]).ravel()

    def entries(self, pack: Ulid) -> list[int]:
        """The known entries, in order."""
        rows = self.packs.get(pack)
        return [] if rows is None else np.flatnonzero(rows["raw"]).tolist()

    def ids(self, pack: Ulid) -> set[Digest]:
        """The block ids of these entries."""
        rows = self.packs.get(pack)
        return set() if rows is None else {Digest(block.tobytes()) for block in rows["id"][rows["raw"] != 0]}


def find_copies(packs: Packs, wanted: Collection[Digest], *, unless: Mapping[Ulid, Collection[int]]) -> dict[Digest, list[BlockCopy]]:
    """All copies of blocks, by the footers of the listed packs, without known bad ones and the entries in `unless`."""
    copies: dict[Digest, list[BlockCopy]] = {}
    if not wanted:
        return copies
    wanted = set(wanted)
    heads = np.sort(_heads(np.frombuffer(b"".join(wanted), np.uint8).reshape(-1, DIGEST_BYTES)))
    for pack, footer in packs.footers():
        ids = np.ascontiguousarray(footer.entries["id"]).view(np.uint8).reshape(-1, DIGEST_BYTES)
        bad = packs.bad.get(pack)
        for entry in _hits(ids, heads):
            block = Digest(ids[entry].tobytes())
            if block in wanted and entry not in unless.get(pack, ()) and not (bad and entry in bad.entries):
                copies.setdefault(block, []).append(BlockCopy(pack, entry, footer.entries[entry : entry + 1].copy()))
    return copies


def _heads(ids: Ids) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(ids[:, :8]).view(np.uint64).ravel()


def _hits(ids: Ids, heads: npt.NDArray[np.uint64]) -> Iterator[int]:
    if len(ids):
        own = _heads(ids)
        at = np.minimum(np.searchsorted(heads, own), len(heads) - 1)
        yield from np.flatnonzero(heads[at] == own).tolist()

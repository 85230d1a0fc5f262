"""Blocks of packs as parts name them; they replace the footers of packs that cannot be trusted.

An entry table like a footer's, with gaps: a row with ``raw`` 0 is absent.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, Ulid
from tensorstore_ck.format.pack import ENTRY_DTYPE, Entries
from tensorstore_ck.format.part import Extents
from tensorstore_ck.maintenance.fsck.check_packs import Packs

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
        for field in _SHARED:
            rows[field][entries] = extents[field]
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

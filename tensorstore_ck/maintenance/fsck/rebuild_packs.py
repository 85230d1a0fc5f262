"""Rebuilds a damaged pack P: writes the blocks that snapshots need into new packs, and relocates them there.

Each block comes from P if it is good there, else from another copy. Unlike compaction this never condemns P, so it need not know
everything that is needed of P: blocks that the relocation does not list stay, and gc frees P when nothing needs it.
"""

import threading
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import rescue
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import StoredBlock
from tensorstore_ck.format.pack import BASE_DTYPE, Entries, Footer, pack_name
from tensorstore_ck.gc.compact import CompactedPack, SparsePack, compact
from tensorstore_ck.log import ObjectKey, Op, RefTable
from tensorstore_ck.maintenance.fsck.check_packs import BlockCopy, BlockTables
from tensorstore_ck.maintenance.fsck.good_copies import BlockSource, read_block


class RebuiltPack(NamedTuple):
    """The result for one pack."""

    pack: Ulid
    blocks: int
    """Blocks in a new pack."""
    lost: int
    """Blocks without a good copy."""
    made: Sequence[Ulid] = ()
    """The new packs."""


def rebuild_packs(engine: Engine, needed: BlockTables, source: BlockSource, anchor: int) -> list[RebuiltPack]:
    """Rebuilds packs with their `needed` blocks; lost blocks stay where they were.

    Raises:
        SnapshotExpiredError: gc truncated tombstones since `anchor`: check the store again.
        NoSpaceError: there is no space for the new packs.
    """
    packs, outcomes = [], []
    blocks = _Blocks(engine, source)
    for pack, table in needed.packs.items():
        entries = needed.entries(pack)
        good = blocks.found(pack, table, entries)
        outcomes.append(RebuiltPack(pack, len(good), len(entries) - len(good)))
        if good:
            footer = Footer(table, np.zeros(0, BASE_DTYPE))
            packs.append(SparsePack(pack, footer, np.array(good), int(table["stored"].sum(dtype=np.int64))))
    done = compact(engine, packs, read=blocks.read)
    if done.no_space is not None:
        raise done.no_space
    for move in done.moves:
        commit_relocation(engine, move, anchor)
    made = {move.pack: move.targets for move in done.moves}
    return [
        outcome._replace(made=made[outcome.pack]) if outcome.pack in made else RebuiltPack(outcome.pack, 0, outcome.blocks + outcome.lost)
        for outcome in outcomes
    ]


def commit_relocation(engine: Engine, move: CompactedPack, anchor: int, needed: Collection[ObjectKey] = ()) -> None:
    """Commits a relocation, and rescues its map, its targets and `needed`. Raises `SnapshotExpiredError`: gc freed some of them."""
    keys = [ObjectKey("moved", move.ulid), *(ObjectKey("pack", target) for target in move.targets), *needed]

    def build(view: RefTable) -> list[Op]:
        relocate = Op.relocate(move.pack, move.ulid, move.hash, move.targets)
        return [relocate, *rescue(view, keys, anchor, f"repair of {pack_name(move.pack)}")]

    engine.log.append(build)


class _Blocks:
    """Good blocks of damaged packs."""

    def __init__(self, engine: Engine, source: BlockSource) -> None:
        self._engine = engine
        self._source = source
        self._lock = threading.Lock()

    def found(self, pack: Ulid, table: Entries, entries: list[int]) -> list[int]:
        """The entries with a good copy."""
        good: set[int] = set()

        def look(entry: int) -> None:
            if self._get(pack, table, entry) is not None:
                with self._lock:
                    good.add(entry)

        for_each(entries, look, cpu_threads() if self._engine.backend.is_local else REMOTE_THREADS)
        return sorted(good)

    def read(self, pack: Ulid, footer: Footer, entries: list[int]) -> list[StoredBlock]:
        """The blocks for `compact`."""
        blocks = [self._get(pack, footer.entries, entry) for entry in entries]
        if any(block is None for block in blocks):
            raise CorruptObjectError(f"{pack_name(pack)}: a block can no longer be read", object_id=pack_name(pack))
        return [block for block in blocks if block is not None]

    def _get(self, pack: Ulid, table: Entries, entry: int) -> StoredBlock | None:
        row = table[entry : entry + 1]
        block = Digest(row["id"][0].tobytes())
        own = read_block(self._engine.backend, BlockCopy(pack, entry, row), block)
        return own if own is not None else self._source.get(block)

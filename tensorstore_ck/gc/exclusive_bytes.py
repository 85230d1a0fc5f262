"""Bytes that each snapshot adds to the store: a block counts for the first snapshot that has it."""

import numpy as np

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import locate_blocks
from tensorstore_ck.gc.byte_sums import distinct_blocks
from tensorstore_ck.gc.live_bits import PackArray, read_parts
from tensorstore_ck.log import RefTable, SnapshotRow


class ExclusiveBytes:
    """Called for one snapshot after another, returns the bytes that each adds to those before it. Holds one part at a time in memory."""

    def __init__(self, engine: Engine, view: RefTable) -> None:
        self._engine = engine
        self._view = view
        self._seen = PackArray(np.bool_)
        self._counted: set[Ulid] = set()

    def __call__(self, info: SnapshotRow) -> int:
        """Stored bytes of its blocks and parts that no earlier snapshot has; 0 if it was counted already.

        Raises:
            DamageError: its record or a part cannot be read.
        """
        if info.ulid in self._counted:
            return 0
        self._counted.add(info.ulid)
        added = 0
        for ulid, part, size_bytes in read_parts(self._engine, info):
            if ulid not in self._counted:
                self._counted.add(ulid)
                added += size_bytes
                locations = locate_blocks(self._engine, self._view, part)
                blocks = distinct_blocks(locations.packs, locations.extents)
                at = blocks.positions(self._seen)
                added += int(blocks.stored[~self._seen.values[at]].sum(dtype=np.int64))
                self._seen.values[at] = True
        return added

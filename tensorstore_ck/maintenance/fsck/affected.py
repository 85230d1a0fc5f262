"""The tensors and values that cannot be restored when parts of a snapshot, or their blocks, cannot be read.

It keeps the first part of each layout open, which has the layout and the values. The caller passes the other parts and rank states one
after another, so memory does not grow with the number of ranks.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.block_assignment import assign_blocks, first_rank_with_layout, regions_of_rank
from tensorstore_ck.format.layout import ExplicitRegions
from tensorstore_ck.format.part import Part
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.tree import parse
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.maintenance.describe import blob_rows, names_of_blobs, part_prefix
from tensorstore_ck.maintenance.fsck.findings import require_reachable

NOTHING: Final = ("no tensor: it restores, but is not whole",)
"""Affected by the loss of a part without bytes."""


class AffectedTensors:
    """The layouts of one snapshot's parts."""

    def __init__(self, engine: Engine, info: SnapshotInfo, record: Record, world_size: int, layout_of: bytes | None) -> None:
        """`world_size`, `layout_of`: as in any of the ranks' parts; 0 and None if none can be read."""
        self._engine = engine
        self._info = info
        self._record = record
        self._world_size = world_size
        self._layout_of = layout_of
        self._readers: dict[int, SnapshotReader | StoreError] = {}
        self._alone: tuple[int, SnapshotReader | StoreError] | None = None
        """The rank state that was opened last."""

    def is_known(self, rank: int) -> bool:
        """Whether the layout of part `rank` is known."""
        return self._layout_of is not None or 0 < self._world_size <= rank

    def first(self, rank: int) -> int:
        """The first part with the layout of part `rank`."""
        return rank if self._layout_of is None or rank >= self._world_size else first_rank_with_layout(self._layout_of, rank)

    def problem(self, part: Part, name: str) -> StoreError | None:
        """Why a part does not fit its layout; for the part that has the layout, why layout, values or tree cannot be read."""
        first = self.first(part.rank)
        reader = self._reader(first)
        if isinstance(reader, StoreError):
            return reader if first == part.rank else None
        try:
            reader.plan_of(part, name)
        except StoreError as exc:
            return exc
        return None

    def names(self, part: Part, rows: npt.NDArray[np.bool_]) -> Sequence[str]:
        """The names with a block in the extent rows that are set in `rows`; empty for all."""
        reader = self._reader(self.first(part.rank))
        if isinstance(reader, StoreError):
            return self._whole(part.rank)
        try:
            plan = reader.plan_of(part, reader.name)
        except StoreError:
            return self.names_of_lost(part.rank)
        names = names_of_blobs(reader, [blob for blob in range(1, len(part.blobs)) if _any(rows, blob_rows(part, blob))])
        tensors = enumerate(reader.layout.tensors)
        names += [spec.name for number, spec in tensors if any(_any(rows, held.rows) for held in plan.of(number))]
        return [part_prefix(part) + name for name in names]

    def names_of_lost(self, rank: int) -> Sequence[str]:
        """The names that cannot be restored without part `rank`; empty for all."""
        first = self.first(rank)
        reader = self._reader(first) if first != rank else None
        if not isinstance(reader, SnapshotReader):
            return self._whole(rank)
        layout = reader.layout
        explicit = {number for number, spread in enumerate(layout.spreads) if isinstance(spread, str)}
        held = regions_of_rank(layout, rank, reader.ranks, [ExplicitRegions(number, ()) for number in explicit])
        owned = {held[share.region].tensor for share in assign_blocks(layout, held, rank, self._engine.config.block_bytes)}
        return [layout.tensors[number].name for number in sorted(owned | explicit)] or NOTHING

    def _whole(self, rank: int) -> Sequence[str]:
        """The affected names if the layout of part `rank` is unreadable."""
        return [f"rank_state[{rank - self._world_size}]"] if 0 < self._world_size <= rank else ()

    def _reader(self, first: int) -> SnapshotReader | StoreError:
        """The first part of a layout, opened and with a sound tree; or why that is impossible."""
        if self._alone is not None and self._alone[0] == first:
            return self._alone[1]
        if first in self._readers:
            return self._readers[first]
        opened = self._open(first)
        if first >= self._world_size:
            self._alone = first, opened
        else:
            self._readers[first] = opened
        return opened

    def _open(self, first: int) -> SnapshotReader | StoreError:
        try:
            reader = SnapshotReader(self._engine, self._info, first, record=self._record)
            parse(reader.layout, len(reader.values), f"the layout of {reader.name}")
        except StoreError as exc:
            require_reachable(self._engine.backend, exc)
            return exc
        return reader


def _any(rows: npt.NDArray[np.bool_], chosen: range) -> bool:
    return bool(rows[chosen.start : chosen.stop].any())

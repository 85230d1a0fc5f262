"""The blocks of tensors that the caller declared frozen. Only every few saves read them; the others rely on the ids of the last read."""

from collections.abc import MutableSequence, Sequence

from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.interfaces import CapturedState, TensorBlock
from tensorstore_ck.engine.write.pack_writer import PackWriter
from tensorstore_ck.errors import FrozenChangedError
from tensorstore_ck.format.block_assignment import BlockShare, Region


class FrozenBlocks:
    """The frozen tensors of a part that this save must read."""

    def __init__(self, captured: CapturedState, blocks: Sequence[TensorBlock], places: Sequence[tuple[Region, int, BlockShare]]) -> None:
        """`blocks` and `places` of all tensors: see `places_of`."""
        self._captured = captured
        self._rows: dict[int, list[int]] = {}
        for block in blocks:
            if block.tensor in captured.frozen:
                self._rows.setdefault(block.tensor, []).append(block.row)
        cuts: dict[int, list[tuple[object, ...]]] = {}
        for region, _, share in places:
            if region.tensor in captured.frozen:
                cuts.setdefault(region.tensor, []).append((region.is_flat, region.offsets, region.sizes, share.start, share.lengths))
        self._cuts = {tensor: repr(several).encode() for tensor, several in cuts.items()}
        """Which blocks of each tensor this rank stores: another rank may store them at the next save."""

    def rely_on_known(self, packs: PackWriter, ids: MutableSequence[Digest]) -> None:
        """Sets the `ids` of tensors that need not be read, and leaves those tensors out."""
        for tensor in [*self._rows]:
            known, rows = self._captured.frozen[tensor], self._rows[tensor]
            if not known.is_due and known.cut == self._cuts[tensor] and len(known.ids) == len(rows) and packs.rely_on(known.ids):
                known.unread += 1
                for row, block in zip(self._rows.pop(tensor), known.ids, strict=True):
                    ids[row] = block

    def note(self, ids: Sequence[Digest]) -> None:
        """Remembers the blocks of the tensors that were read.

        Raises:
            FrozenChangedError: one has other bytes than when it was last read.
        """
        for tensor, rows in self._rows.items():
            known, cut, read = self._captured.frozen[tensor], self._cuts[tensor], [ids[row] for row in rows]
            if known.cut == cut and len(known.ids) == len(read) and known.ids != read:
                name = self._captured.layout.tensors[tensor].name
                raise FrozenChangedError(
                    f"{name} was declared frozen, but has changed since it was last read: nothing was published, and the {known.unread} "
                    "snapshots since then have its earlier values. Leave it out of frozen=",
                    object_id=name,
                )
            known.ids, known.cut, known.unread = read, cut, 0

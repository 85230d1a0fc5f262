"""Which blocks need not be written, since the store has them, or not even be read: of frozen tensors, and those that a device has hashed.

A block that is written is always hashed by the host, from the bytes that are written.
"""

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Final

from tensorstore_ck.common.ids import ZERO_DIGEST, Digest, Ulid
from tensorstore_ck.common.user_frames import user_stacklevel
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState, TensorBlock
from tensorstore_ck.engine.reachability import BlockLocations, chain_of, locate_blocks, locations_of
from tensorstore_ck.engine.write.pack_writer import PackWriter
from tensorstore_ck.engine.write.sampled_checks import CaptureSample
from tensorstore_ck.engine.write.write_plan import WritePlan
from tensorstore_ck.errors import DamageError, FrozenChangedError
from tensorstore_ck.format.block_assignment import regions_of_rank
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import Part
from tensorstore_ck.log import ObjectKey, RefTable
from tensorstore_ck.log.block_index import Location

_logger: Final = logging.getLogger("tensorstore_ck.engine")


class DedupIndex:
    """Looks blocks up in the parent's parts, then in this host's index. Uses only packs that are complete and stay."""

    def __init__(
        self, engine: Engine, parent: Digest | None, rank: int = 0, ranks: int = 1, *, elsewhere: bool = True, view: RefTable | None = None
    ) -> None:
        """`rank` and `ranks` choose the parts of the parent to look at; from `ranks` on, a number means the part of a rank's own state.

        With `elsewhere` false the index is not used: then a pin on the parent keeps what the save relies on. `view`: by default the
        log as this host knows it.
        """
        self._engine = engine
        self._elsewhere = elsewhere
        self._view = view or engine.log.view()
        self.parts: list[tuple[Part, BlockLocations]] = []
        """The parts of the parent that were read, and where their blocks are."""
        self._rows: list[dict[Digest, int]] = []
        """The row of each block in each part."""
        self._usable_bytes: dict[Ulid, int] = dict.fromkeys(packs_of_damaged(engine, self._view, rank), 0)
        # the oldest one with that root: anybody may append a later put of it, whose parts say that its blocks are elsewhere
        held = next(filter(self._view.is_live, reversed(self._view.with_root(parent))), None) if parent else None
        info = self._view.snapshot(held) if held is not None else None
        if info is None:
            _logger.debug(
                "no snapshot to share blocks with: they are looked up in this host's index" if elsewhere else "no block is shared"
            )
            return
        try:
            record = engine.recent_record(info)
            for number in matching_parts(len(record.parts), engine.read_part(record, 0).world_size, rank, ranks):
                part = engine.read_part(record, number)
                self.parts.append((part, locate_blocks(engine, self._view, part)))
                blocks = part.block_ids()
                self._rows.append(dict(zip(blocks, range(len(blocks)), strict=True)))
        except DamageError as exc:
            warnings.warn(f"cannot reuse the blocks of the parent snapshot, all are written again: {exc}", stacklevel=user_stacklevel())
        _logger.debug("%d parts of %s@%s, root %s, have blocks to share", len(self.parts), info.ref, info.step, info.root.hex())

    def find(self, blocks: Sequence[Digest]) -> dict[Digest, Location]:
        """See `BlockLookup`."""
        known: dict[Digest, Location] = {}
        for (part, places), rows_of_part in zip(self.parts, self._rows, strict=True):
            rows = {block: row for block in blocks if (row := rows_of_part.get(block)) is not None}
            if not rows:
                continue  # after a save of many more ranks, most parts
            known |= self._usable(zip(rows, locations_of(part, places.packs, places.extents, list(rows.values())), strict=True))
        if self._elsewhere and len(known) < len(blocks):
            known |= self._usable(self._engine.index.find([block for block in blocks if block not in known]).items())
        return known

    def _usable(self, found: Iterable[tuple[Digest, Location | None]]) -> dict[Digest, Location]:
        """The blocks that lie, with their bases, in packs that may be relied on."""
        usable: dict[Digest, Location] = {}
        for block, location in found:
            for place in () if location is None else chain_of(location) if location.bases else (location,):
                if place.pack not in self._usable_bytes:
                    self._usable_bytes[place.pack] = self._bytes_of(place.pack)
                if place.offset + place.stored > self._usable_bytes[place.pack]:
                    break
            else:
                if location is not None:
                    usable[block] = location
        return usable

    def _bytes_of(self, pack: Ulid) -> int:
        """The pack's size; 0 if it is condemned, lost (later snapshots must not rely on it), or was repacked.

        Also 0 if it is in a cold location: a new snapshot must be readable without that, and a save must not need it.
        """
        state = self._view.object_state(ObjectKey("pack", pack))
        if state is not None or any(self._view.relocations(pack)) or self._view.location_of(pack) is not None:
            return 0
        try:
            return self._engine.backend.size(pack_name(pack))
        except DamageError:
            return 0


def matching_parts(parts: int, world_size: int, rank: int, ranks: int) -> range:
    """The parts of a snapshot with which a rank most likely shares blocks: if the number of ranks differs, the parts in the same position.

    All ranks together read each part about once.
    """
    first = world_size if rank >= ranks else 0
    place = rank % ranks
    return range(min(parts, first + place * world_size // ranks), min(parts, first - (-(place + 1) * world_size // ranks)))


def packs_of_damaged(engine: Engine, view: RefTable, rank: int) -> Iterator[Ulid]:
    """The packs of snapshots that are marked as damaged: their blocks are written again.

    Of a snapshot of many ranks this reads only the part that `rank` is likely to hold, so that no rank reads the parts of all.
    """
    for info in view.marked("damaged"):
        with contextlib.suppress(DamageError):
            record = engine.read_record(info)
            for number in range(len(record.parts)) if rank == 0 else [min(rank, len(record.parts) - 1)]:
                with contextlib.suppress(DamageError):
                    yield from locate_blocks(engine, view, engine.read_part(record, number)).packs


class FrozenBlocks:
    """The frozen tensors of a part that this save must read."""

    def __init__(self, captured: CapturedState, plan: WritePlan) -> None:
        self._captured, self._cuts = captured, plan.cuts
        self._rows: dict[int, list[int]] = {}
        for block in plan.blocks:
            if block.tensor in captured.frozen:
                self._rows.setdefault(block.tensor, []).append(block.row)

    def rely_on_known(self, packs: PackWriter, ids: MutableSequence[Digest]) -> None:
        """Sets the `ids` of tensors that need not be read, and leaves those tensors out."""
        for tensor in [*self._rows]:
            known, rows = self._captured.frozen[tensor], self._rows[tensor]
            if not known.is_due and known.cut == self._cuts[tensor] and len(known.ids) == len(rows) and packs.claim_all_stored(known.ids):
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


def held_blocks(captured: CapturedState, tensors: Sequence[int], rank: int, block_bytes: int) -> list[TensorBlock]:
    """The blocks of these tensors that a rank holds, which may be more than it writes."""
    blocks, ends = list[TensorBlock](), dict[int, int]()
    for region in regions_of_rank(captured.layout, rank, (rank,), captured.explicit, tensors=tensors):
        start = ends.get(region.tensor, 0)
        for length in region.block_lengths(captured.layout.tensors[region.tensor], block_bytes):
            blocks.append(TensorBlock(len(blocks), region.tensor, start, start + length))
            start += length
        ends[region.tensor] = start
    return blocks


def skip_unchanged(
    captured: CapturedState, blocks: Sequence[TensorBlock], ids: MutableSequence[Digest], packs: PackWriter, sample: CaptureSample
) -> Mapping[int, Digest]:
    """Sets the `ids` of those `blocks` that need not be read. Returns the ids that devices computed of the others, by row."""
    assert captured.device_blocks is not None
    if not blocks:
        return {}
    computed = captured.device_blocks.ids(captured.sources, blocks)
    hashed = [block for block, digest in zip(blocks, computed, strict=True) if digest is not None]
    hashed_ids = [digest for digest in computed if digest is not None]
    are_there = packs.claim_stored(hashed_ids, [block.size_bytes for block in hashed])
    others, skipped = {}, []
    for block, digest, is_there in zip(hashed, hashed_ids, are_there, strict=True):
        if is_there:
            ids[block.row] = digest
            skipped.append(block)
        else:
            others[block.row] = digest
    sample.note_hashed(hashed, hashed_ids)
    sample.note_unread(skipped)
    unchanged = {block.tensor for block in skipped} - {block.tensor for block in blocks if ids[block.row] is ZERO_DIGEST}
    captured.device_blocks.note_unchanged([captured.sources[tensor] for tensor in unchanged])
    return others

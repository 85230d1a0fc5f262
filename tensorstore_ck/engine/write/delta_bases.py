"""Which blocks of a save may be encoded against others: weights against their fp32 masters, and any block against the snapshot before.

Bases are verified before a block is encoded: a block against its id, one that was kept in memory against its sum, weights against the
rounded masters. A base that is read and is damaged is not used. One that is in memory is not read: if the store's copy was damaged since,
the differences to it are lost, too, until the next block that is stored in full.
"""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.host_memory import free_bytes
from tensorstore_ck.common.ids import Digest, block_hasher, block_id
from tensorstore_ck.engine.engine import KEPT_SHARE, SAMPLES_SHARE, Engine, KeptBlock
from tensorstore_ck.engine.interfaces import CapturedState, TensorBlock
from tensorstore_ck.engine.reachability import BlockLocations, chain_of, location_of
from tensorstore_ck.engine.read.block_reader import decode_at
from tensorstore_ck.engine.write.write_plan import PartAuthor
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.codec import (
    KINDS,
    Changes,
    Codec,
    Elements,
    apply_changes,
    cast_sample,
    max_changes,
    may_be_worth_reading,
    patch_changes,
    sum_of,
)
from tensorstore_ck.format.pack import MAX_BASES
from tensorstore_ck.format.part import Part
from tensorstore_ck.log.block_index import Base, Location

SPARSE_SHARE: Final = 0.1
"""A delta of at most this share of the raw size changes few elements: the next delta uses it as the base, instead of its own base."""
CHAIN_SHARE: Final = 0.5
"""The share of the raw size that all deltas of such a chain may have together."""
MAX_CHAIN: Final = 128
SAMPLE_BYTES: Final = 1024
"""The bytes of a master that are compared to find its weights."""


class Comparison(NamedTuple):
    """How a block differs from its base: the one before, as a rule."""

    before: Digest
    memory: memoryview
    """Holds the new block if `is_few`, else the base."""
    changes: Changes
    is_few: bool


class DeltaBase(NamedTuple):
    """A block of an earlier snapshot that is the base of a delta."""

    base: Base
    age: int
    raw: memoryview
    """The base, if it `is_intact`; else the block is there now."""
    sum: bytes
    """Of the base, when it was verified."""
    changes: Changes | None = None
    """What of it the block changes, if that is known."""
    is_intact: bool = True

    def patched(self, changes: Changes) -> Comparison:
        """The block, which differs by few `changes`, in the memory of this base, which it overwrites."""
        memory = memoryview(bytearray(self.raw)) if self.raw.readonly else self.raw  # LZ4 and zstd decode into immutable bytes
        apply_changes(changes.gaps, changes.values, memory, is_float=changes.is_float)
        return Comparison(self.base.block, memory, changes, is_few=True)


class ParentBlocks:
    """The tensors' blocks of the same part of the snapshot before."""

    def __init__(self, engine: Engine, part: Part, places: BlockLocations, full_every: int) -> None:
        self._backend = engine.backend
        self._kept = engine.kept_blocks
        self._samples = engine.base_samples
        self._part = part
        self._places = places
        self._first = int(part.blobs["blocks"].sum(dtype=int))
        self._full_every = full_every
        view = engine.log.view()
        self._is_cold = lru_cache(None)(lambda pack: view.location_of(pack) is not None)  # not `self`: a cycle would keep the view
        """Whether a pack is in a cold location. Chains have the same few packs."""
        self._offered: list[Digest] = []
        """The new blocks that were kept."""

    def identify(self, row: int, raw: memoryview, elements: Elements) -> tuple[Digest, Comparison | None]:
        """The id of the block in `row` of the tensors, and its comparison with the block before if that is in memory and unharmed.

        One pass does both: each piece is compared, then hashed while it is in the core's cache.
        """
        before = self._part.block_id(row + self._first)
        kept = self._kept.take(before)
        if kept is None or len(kept.raw) != len(raw):
            return block_id(raw), None
        hasher, limit = block_hasher(), max_changes(len(raw), elements.item_bytes)
        changes = patch_changes(raw, kept.raw, elements.item_bytes, is_float=elements.is_float, limit=limit, visit=hasher.update)
        compared = Comparison(before, kept.raw, changes, changes.changed <= limit) if changes.base_sum == kept.sum else None
        return Digest(hasher.digest()), compared

    def candidate(self, row: int, raw: Buffer, elements: Elements, compared: Comparison | None) -> DeltaBase | None:
        """The base for a delta of the block in `row` of the tensors; None if a delta is not worth a try."""
        found = self._base_of(row + self._first, len(raw))
        if found is None:
            return None
        base, age = found
        assert base.location is not None
        if compared is not None and compared.before == base.block:
            changes = compared.changes
            return DeltaBase(base, age, raw=compared.memory, sum=changes.base_sum, changes=changes, is_intact=not compared.is_few)
        kept = self._kept.take(base.block)
        if kept is not None and len(kept.raw) == len(raw) and sum_of(kept.raw) == kept.sum:
            return DeltaBase(base, age, kept.raw, kept.sum)
        sampled = self._samples.take(base.block)
        if sampled is not None and not may_be_worth_reading(raw, sampled, elements):
            return None
        read = self._read(base.block, base.location, len(raw))
        return None if read is None else DeltaBase(base, age, read, sum_of(read))

    def _base_of(self, row: int, raw_bytes: int) -> tuple[Base, int] | None:
        """The base and its age, by a row of the part."""
        if row >= self._part.block_count:  # a part that somebody else wrote need not fit its layout
            return None
        try:
            place = location_of(self._part, self._places.packs, self._places.extents, row)
        except DamageError:
            return None
        if place.raw != raw_bytes or place.codec == Codec.CAST:
            return None
        links = links_bytes = 0
        for link in chain_of(place):
            if self._is_cold(link.pack):
                return None
            if link.codec == Codec.DELTA:
                links, links_bytes = links + 1, links_bytes + link.stored
        if place.codec == Codec.DELTA:
            if place.stored <= SPARSE_SHARE * raw_bytes:
                if links >= MAX_CHAIN or links_bytes + place.stored > CHAIN_SHARE * raw_bytes:
                    return None
            elif place.flags >= self._full_every - 1:
                self._kept.take(place.bases[0].block)  # no later save asks for it
                return None
            else:
                return place.bases[0], place.flags + 1
        return Base(self._part.block_id(row), place), 1

    def keep(self, block: Digest, compared: Comparison) -> None:
        """Keeps a block that changed a little in the memory of its base: it is the base of the next difference."""
        if compared.is_few:
            self._kept.offer(block, KeptBlock(compared.memory, compared.changes.sum))
            self._offered.append(block)

    def keep_base(self, base: DeltaBase) -> None:
        """Keeps the base of a difference that changes much, if it is there: it is the base of the next one, too.

        Not immutable bytes: few changes are applied in what is kept.
        """
        if base.is_intact and not base.raw.readonly:
            self._kept.offer(base.base.block, KeptBlock(base.raw, base.sum))

    def keep_sample(self, block: Digest, sampled: bytes) -> None:
        """Keeps a sample of a block that was stored in full: it is the base of the next difference, if one is worth it."""
        self._samples.offer(block, sampled)

    def end_turn(self) -> None:
        """After a save: keeps as much from now on as the memory that is free then allows."""
        free = free_bytes()
        self._kept.end_turn(free, KEPT_SHARE)
        self._samples.end_turn(free, SAMPLES_SHARE)

    def drop_kept(self) -> None:
        """After a save that failed: no later one asks for its blocks. Bases stay: the next try asks for them."""
        for block in self._offered:
            self._kept.take(block)

    def _read(self, block: Digest, place: Location, raw_bytes: int) -> memoryview | None:
        try:
            raw = decode_at(self._backend, place)
        except DamageError:
            return None
        return raw if len(raw) == raw_bytes and block_id(raw) == block else None


def earlier_part(
    engine: Engine, before: Sequence[tuple[Part, BlockLocations]], layout: Digest, author: PartAuthor, regions: bytes, *, full_every: int
) -> ParentBlocks | None:
    """The part among these that has the same tensors at the same positions, so that the rows of their blocks correspond."""
    key = (layout, author.rank, author.world_size, author.layout_of, regions)
    for part, places in before:
        if (part.layout_id, part.rank, part.world_size, part.layout_of, part.regions) == key:
            return ParentBlocks(engine, part, places, full_every)
    return None


class Fp32Masters:
    """Finds the fp32 masters of 16-bit weights in the same state, which are most likely their roundings."""

    def __init__(self, captured: CapturedState, blocks: Sequence[TensorBlock]) -> None:
        """`blocks`: what this rank stores, tensor by tensor."""
        self._captured = captured
        self._blocks: dict[int, list[TensorBlock]] = {}
        for block in blocks:
            if block.tensor not in captured.frozen:
                self._blocks.setdefault(block.tensor, []).append(block)
        self.of = self._find()
        """Weights -> masters."""

    def _find(self) -> dict[int, int]:
        tensors = self._captured.layout.tensors
        weights = [number for number in self._blocks if tensors[number].dtype in KINDS]
        wanted = {(tensors[number].dtype, tensors[number].shape) for number in weights}
        known: dict[tuple[object, ...], int] = {}
        for number, blocks in self._blocks.items():
            spec, start = tensors[number], blocks[0].start
            for dtype in KINDS:
                if spec.dtype == "float32" and (dtype, spec.shape) in wanted:
                    sample = self._captured.sources[number].read(start, min(start + SAMPLE_BYTES, blocks[0].stop))
                    known.setdefault((dtype, spec.shape, start, cast_sample(sample, dtype)), number)
        master_of = {}
        for number in weights:
            spec, first = tensors[number], self._blocks[number][0]
            sample = self._captured.sources[number].read(first.start, min(first.start + SAMPLE_BYTES // 2, first.stop))
            master = known.get((spec.dtype, spec.shape, 2 * first.start, bytes(sample)))
            if master is not None:
                master_of[number] = master
        return master_of

    def blocks(self, block: TensorBlock) -> list[TensorBlock]:
        """The blocks of the master that have exactly the elements of a block of weights; none if it is cut differently."""
        masters, start, stop = self._blocks[self.of[block.tensor]], 2 * block.start, 2 * block.stop
        first = bisect_left(masters, start, key=lambda block_of_master: block_of_master.start)
        covering = masters[first : bisect_left(masters, stop, first, key=lambda block_of_master: block_of_master.start)]
        fits = 0 < len(covering) <= MAX_BASES and covering[0].start == start and covering[-1].stop == stop
        return covering if fits and all(one.stop == other.start for one, other in pairwise(covering)) else []

    def read(self, block: TensorBlock) -> memoryview:
        """The bytes of a block."""
        return memoryview(self._captured.sources[block.tensor].read(block.start, block.stop))

"""Writes what one rank contributes to a snapshot: its blocks, and the part that says where they lie. Both are durable then.

Runs of blocks are read, sampled, identified, encoded and stored by several threads. Knows neither refs nor the log, and no torch.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

import numpy as np

from tensorstore_ck.chunker import cut_opaque
from tensorstore_ck.common.buffers import Buffer, batches
from tensorstore_ck.common.ids import ZERO_DIGEST, Digest, Ulid, block_id
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.common.threads import Scratch, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.interfaces import CapturedState, TensorBlock
from tensorstore_ck.engine.reachability import BlockLocations, extents_of, require_bases, with_bases
from tensorstore_ck.engine.write.dedup import FrozenBlocks, skip_unchanged
from tensorstore_ck.engine.write.delta_bases import SPARSE_SHARE, Comparison, Fp32Masters, ParentBlocks, earlier_part
from tensorstore_ck.engine.write.pack_writer import BlockEncoding, PackWriter
from tensorstore_ck.engine.write.sampled_checks import NOT_VERIFIED, CaptureSample, Sampling, require_unchanged
from tensorstore_ck.engine.write.write_plan import SINGLE, PartAuthor, WritePlan, plan_of
from tensorstore_ck.format.codec import Codec, Coding, Elements, Encoder, elements_of, sample_of
from tensorstore_ck.format.layout import layout_id
from tensorstore_ck.format.part import BLOB_DTYPE, Extents, Part, encode_values, part_name, require_readable
from tensorstore_ck.format.values import msgpack_blobs
from tensorstore_ck.log.block_index import Base, Location

_logger: Final = logging.getLogger("tensorstore_ck.engine")
MIN_RUN_BYTES: Final = 4 << 20
MAX_RUN_BYTES: Final = 16 << 20
"""Blocks that one thread handles at a time: they lie side by side in a pack, and a restore reads them together."""
RUNS_A_THREAD: Final = 4
"""The least number of runs for each thread, if there are enough blocks: so that all threads end at about the same time."""
RUN_BLOCKS: Final = 512
"""Small blocks are hashed and appended together, up to this many."""
MAX_OPEN_PACKS: Final = 4
"""The packs that are written in parallel on local files: a file admits one thread at a time."""


class BlockLookup(Protocol):
    """Looks up blocks in the store."""

    @property
    def parts(self) -> Sequence[tuple[Part, BlockLocations]]:
        """Those parts of the snapshot before that are most like the new part, and where their blocks are."""

    def find(self, blocks: Sequence[Digest], /) -> Mapping[Digest, Location]:
        """The locations of those `blocks` that may be relied on."""


class WrittenPart(NamedTuple):
    """A part that a snapshot may name."""

    ulid: Ulid
    part: Part
    added: Mapping[Digest, Location]
    """The locations of the blocks that were not in the store before."""
    new_bytes: int
    """The stored bytes of its new packs and of the part itself."""
    tensors: "TensorBlocks"
    """Its tensors."""


class BlobBlocks(NamedTuple):
    """What a rank has stored of the layout and the large values."""

    rows: Extents
    """The part's `blobs`."""
    ids: list[Digest]
    """The ids of their blocks, in order."""


class TensorBlocks(NamedTuple):
    """What a rank has stored of the tensors."""

    ids: list[Digest]
    """The ids of its blocks, in order."""
    inline: bytes
    """The bytes of small tensors, which lie inside the part."""
    plan: WritePlan
    """Its blocks, and the small tensors in `inline`."""
    sample: CaptureSample
    """The sample that was taken while the tensors were read."""


def write_part(
    engine: Engine,
    captured: CapturedState,
    known: BlockLookup,
    *,
    anchor: int,
    author: PartAuthor = SINGLE,
    coding: Coding,
    meter: SaveMeter | None = None,
    apart: bool = False,
    sampling: Sampling = NOT_VERIFIED,
) -> WrittenPart:
    """Hashes and stores everything that this rank has to store.

    `known`: which blocks need not be written, as of the log entry `anchor`. An error that `meter` raises ends the work. `apart`: the layout
    and large values get separate, small packs. `sampling`: what of the tensors is read a second time at the end.

    Raises:
        FrozenChangedError: a tensor declared frozen has other bytes than when it was last read.
        CaptureChangedError: a tensor has other bytes than when it was read first.
    """
    earlier, plan = None, plan_of(captured, author, engine.config.block_bytes)
    if coding.full_every:  # blocks may be stored as differences to those of the snapshot before
        layout = layout_id(captured.layout.encoded)
        earlier = earlier_part(engine, known.parts, layout, author, regions=plan.regions, full_every=coding.full_every)
    write = partial(write_tensors, captured, plan, coding=coding, earlier=earlier, sampling=sampling)
    try:
        with open_packs(engine, known, meter) as first:
            if not apart:  # tensors first: after a layout of an odd size, the reads of all of them would be copied a third slower
                tensors = write(first)
            packs, blobs = [first], write_blobs(captured, plan, first, author=author, coding=coding)
        if apart:
            with open_packs(engine, known, meter) as second:
                packs, tensors = [first, second], write(second)
        tensors.sample.verify(tensors.plan.inlined, tensors.inline)
        written = store_part(engine, captured=captured, blobs=blobs, tensors=tensors, packs=packs, anchor=anchor, author=author)
    except BaseException:
        if earlier is not None:
            earlier.drop_kept()
        raise
    if earlier is not None:
        earlier.end_turn()
    return written


@contextmanager
def open_packs(engine: Engine, known: BlockLookup, meter: SaveMeter | None = None) -> Iterator[PackWriter]:
    """A writer of blocks that are not `known`; every pack is durable when the block ends."""
    open_at_once = min(cpu_threads(), MAX_OPEN_PACKS) if engine.backend.is_local else 1
    packs = PackWriter(engine.backend, engine.put_id, known.find, open_packs=open_at_once, meter=meter or SaveMeter())
    try:
        yield packs
        packs.close()
    except BaseException:
        packs.abort()
        raise


def write_blobs(captured: CapturedState, plan: WritePlan, packs: PackWriter, author: PartAuthor, coding: Coding) -> BlobBlocks:
    """Stores the layout and the large values, if this rank is the first one with the layout."""
    encoded_layout = captured.layout.encoded
    is_first = author.rank == author.layout_ranks[0]
    ids = list[Digest]()
    blobs = np.zeros(1 + len(captured.blobs) if is_first else 1, BLOB_DTYPE)
    blobs["size"][0] = len(encoded_layout)
    for number, blob in enumerate((encoded_layout, *captured.blobs) if is_first else ()):
        lengths = cut_opaque(blob) if number else plan.layout_lengths
        view, run, start = memoryview(blob), list[memoryview](), 0
        for length in lengths:
            run.append(view[start : start + length])
            start += length
        ids += packs.add(run, lambda number, run=run: BlockEncoding(Encoder(coding.mode).encode_opaque(run[number])))  # type: ignore[misc]
        blobs[number] = (len(lengths), 0, len(blob))
    return BlobBlocks(blobs, ids)


def write_tensors(
    captured: CapturedState,
    plan: WritePlan,
    packs: PackWriter,
    *,
    coding: Coding,
    earlier: ParentBlocks | None = None,
    sampling: Sampling = NOT_VERIFIED,
) -> TensorBlocks:
    """Stores this rank's share of the tensors, by its `plan`; `earlier` has their blocks in the snapshot before. Takes a sample.

    Raises:
        FrozenChangedError: a tensor declared frozen has other bytes than when it was last read.
        CaptureChangedError: a device and the host read other bytes.
    """
    sample = CaptureSample(captured, sampling)
    blocks, small = plan.blocks, bytes(captured.sources.gather(plan.inlined.ranges))
    ids = [ZERO_DIGEST] * len(blocks)
    frozen = FrozenBlocks(captured, plan) if captured.frozen else None
    if frozen is not None:
        frozen.rely_on_known(packs, ids)
        blocks = [block for block in blocks if ids[block.row] is ZERO_DIGEST]
    computed: Mapping[int, Digest] = {}
    must_agree = sampling.verify_share > 0
    if captured.device_blocks is not None:
        must_agree = must_agree or captured.device_blocks.must_agree
        computed = skip_unchanged(captured, blocks=blocks, ids=ids, packs=packs, sample=sample)
        blocks = [block for block in blocks if ids[block.row] is ZERO_DIGEST]
    masters = None
    if coding.mode != "raw":
        fresh = {block.tensor for block in blocks}  # others are not read: they may stay on a device
        masters = Fp32Masters(captured, [block for block in plan.blocks if block.tensor in fresh])
    writer = RunWriter(
        captured, packs, sample, ids, coding=coding, earlier=earlier, masters=masters, computed=computed, must_agree=must_agree
    )
    threads, runs = cpu_threads() + 1, list[list[TensorBlock]]()
    first_and_last: tuple[list[TensorBlock], list[TensorBlock]] = ([], [])  # weights come after their masters
    for block in blocks:
        first_and_last[block.tensor in writer.weights].append(block)
    for several in filter(None, first_and_last):
        run_bytes = sum(map(attrgetter("size_bytes"), several)) // (RUNS_A_THREAD * threads)
        run_bytes = min(max(run_bytes, MIN_RUN_BYTES), MAX_RUN_BYTES)
        runs += batches(several, attrgetter("size_bytes"), run_bytes, RUN_BLOCKS)
    for_each(runs, writer.store, min(threads, len(runs)))
    for_each([*writer.deferred], writer.store, min(threads, len(writer.deferred)))
    if frozen is not None:
        frozen.note(ids)
    sample.note_inline(plan.inlined, small)
    return TensorBlocks(ids=ids, inline=small, plan=plan, sample=sample)


def store_part(
    engine: Engine,
    captured: CapturedState,
    blobs: BlobBlocks,
    tensors: TensorBlocks,
    packs: Sequence[PackWriter],
    *,
    anchor: int,
    author: PartAuthor,
) -> WrittenPart:
    """Writes the part that names these blocks, which are in the closed `packs`.

    Raises:
        UnsupportedValueError: too many objects take almost no bytes in the store.
        CorruptObjectError: the bases of a block are not valid, so that nobody could read it.
    """
    ids = [*blobs.ids, *tensors.ids]
    places, added, new_bytes = dict[Digest, Location](), dict[Digest, Location](), 0
    for writer in packs:
        places |= writer.found | writer.added
        added |= writer.added
        new_bytes += writer.new_bytes
    extents = extents_of(ids, places)
    part = Part(
        layout_id=layout_id(captured.layout.encoded),
        rank=author.rank,
        world_size=author.world_size,
        blobs=blobs.rows,
        ids=b"".join(ids),
        values=encode_values(captured.values if author.rank == author.layout_ranks[0] else ()),
        inline=tensors.inline,
        packs=extents.packs,
        extents=extents.rows,
        base_ids=extents.base_ids,
        anchor=anchor,
        layout_of=author.layout_of,
        regions=tensors.plan.regions,
    )
    if author.rank == author.layout_ranks[0]:
        numbers = msgpack_blobs(captured.values, "the state") if captured.blobs else ()
        parsed = [*map(captured.blobs.__getitem__, numbers)]
        require_readable(part, captured.layout.encoded, parsed, ranks=author.world_size, ranks_of_layout=len(author.layout_ranks))
    require_bases(part, part.packs, part.extents)
    ulid, encoded = engine.put_id(), part.encode()
    engine.backend.put(part_name(ulid), encoded)
    new_bytes += len(encoded)
    _logger.debug("part %s of rank %d: %d of %d blocks are new, %d bytes", part_name(ulid), author.rank, len(added), len(ids), new_bytes)
    for block, place in added.items():
        if place.bases:
            added[block] = with_bases(place, places)
    return WrittenPart(ulid=ulid, part=part, added=added, new_bytes=new_bytes, tensors=tensors)


class RunWriter:
    """Reads runs of blocks, samples, encodes and stores them, and sets their `ids`; from several threads."""

    def __init__(
        self,
        captured: CapturedState,
        packs: PackWriter,
        sample: CaptureSample,
        ids: list[Digest],
        *,
        coding: Coding,
        earlier: ParentBlocks | None,
        masters: Fp32Masters | None,
        computed: Mapping[int, Digest],
        must_agree: bool,
    ) -> None:
        """`computed`: the ids that devices computed, by row; if they `must_agree`, another id is an error."""
        self._captured, self._packs, self._sample, self.ids = captured, packs, sample, ids
        self.coding, self.earlier, self.masters = coding, earlier, masters
        self._computed, self._must_agree = computed, must_agree
        self.scratch = Scratch()
        self.specs, self._read = captured.layout.tensors[:], captured.sources.read
        self.weights: Mapping[int, int] = masters.of if masters is not None else {}
        """The tensors that are stored as casts of others, which must be written first."""
        self.deferred: list[Sequence[TensorBlock]] = []
        """Runs that wait until the masters of their weights are stored."""
        self.weight_ids: set[Digest] = set()
        """The blocks of weights, before they are claimed: one that is stored as a cast cannot be the base of another cast."""

    def may_be_cast(self, row: int) -> bool:
        """Whether the block in a row, which is stored, may be stored as a cast: weights of the same bytes, such as zeros, were first."""
        block = self.ids[row]
        found = self._packs.found.get(block)
        return block in self.weight_ids or (found is not None and found.codec == Codec.CAST)

    def store(self, blocks: Sequence[TensorBlock]) -> None:
        """Stores the blocks of a run, in order."""
        masters, weights = self.masters, list[TensorBlock]()
        if masters is not None:
            weights = [block for block in blocks if block.tensor in self.weights]
            if any(self.ids[each.row] is ZERO_DIGEST for one in weights for each in masters.blocks(one)):
                self.deferred.append(blocks)
                return
        buffers: list[Buffer] = []
        for block in blocks:
            data = self._read(block.tensor, block.start, block.stop)
            # A frozen tensor is read from its owner's memory: even if it changes now, a block's bytes must match its id.
            buffers.append(bytes(data) if block.tensor in self._captured.frozen else data)
        self._sample.note(blocks, buffers)
        run = None
        if self.coding.mode == "raw" and self.earlier is None:
            ids = self._packs.add(buffers)
        else:
            run = _EncodedRun(self, blocks, buffers)
            ids = self._packs.add(buffers, run.encode, run.identify if self.earlier is not None or weights else None)
        for block, digest in zip(blocks, ids, strict=True):
            self.ids[block.row] = digest
            if self._computed.get(block.row, digest) != digest and self._must_agree:
                require_unchanged(self._captured, {block.tensor})
        if run is not None:
            run.keep_for_next_save()


class _EncodedRun:
    """A run whose blocks may be stored as something other than their bytes. Used by one thread; first `identify`, then `encode`."""

    def __init__(self, writer: RunWriter, blocks: Sequence[TensorBlock], buffers: Sequence[Buffer]) -> None:
        self._writer, self._blocks, self._buffers = writer, blocks, buffers
        self._encoder = Encoder(writer.coding.mode, writer.scratch)
        self._little_changed: dict[int, Comparison] = {}
        """Number in the run -> the block, compared with the one before."""
        self._sampled: dict[int, bytes] = {}
        """Number in the run -> the sample of a block that is stored in full."""

    def identify(self, number: int) -> Digest:
        """The id of a block; compares it with the one before if that is in memory."""
        block, raw, earlier = self._blocks[number], memoryview(self._buffers[number]).cast("B"), self._writer.earlier
        digest, compared = (block_id(raw), None) if earlier is None else earlier.identify(block.row, raw, self._elements_of(block))
        if compared is not None:
            self._little_changed[number] = compared
        if block.tensor in self._writer.weights:
            self._writer.weight_ids.add(digest)
        return digest

    def encode(self, number: int) -> BlockEncoding:
        """The stored form of a block: a cast of its master, a difference to its base, or its own bytes."""
        block, raw, masters, earlier = self._blocks[number], self._buffers[number], self._writer.masters, self._writer.earlier
        elements = self._elements_of(block)
        bases = masters.blocks(block) if masters is not None and block.tensor in self._writer.weights else []
        if masters is not None and bases and not any(self._writer.may_be_cast(base.row) for base in bases):
            cast = self._encoder.encode_cast(raw, [masters.read(base) for base in bases], self._writer.specs[block.tensor].dtype)
            if cast is not None:
                self._little_changed.pop(number, None)
                return BlockEncoding(cast, tuple(Base(self._writer.ids[base.row], None) for base in bases), len(bases))
        if earlier is None:
            return BlockEncoding(self._encoder.encode_tensor(raw, elements))
        candidate = earlier.candidate(block.row, raw, elements, self._little_changed.get(number))
        delta = None if candidate is None else self._encoder.encode_delta(raw, candidate.raw, elements, candidate.changes)
        if candidate is None or delta is None:
            self._sampled[number] = sample_of(raw, elements)
            return BlockEncoding(self._encoder.encode_tensor(raw, elements))
        if delta.changes is None or sum(map(len, delta.encoded.pieces)) > SPARSE_SHARE * len(raw):
            self._little_changed.pop(number, None)  # the base of the next difference is another block
            earlier.keep_base(candidate)
        elif number not in self._little_changed:
            self._little_changed[number] = candidate.patched(delta.changes)
        return BlockEncoding(delta.encoded, (candidate.base,), candidate.age)

    def keep_for_next_save(self) -> None:
        """Keeps what the next save compares its blocks with; the ids of the run are known."""
        earlier, ids = self._writer.earlier, self._writer.ids
        if earlier is not None:
            for number, compared in self._little_changed.items():
                earlier.keep(ids[self._blocks[number].row], compared)
            for number, some in self._sampled.items():
                earlier.keep_sample(ids[self._blocks[number].row], some)

    def _elements_of(self, block: TensorBlock) -> Elements:
        spec = self._writer.specs[block.tensor]
        return elements_of(spec.dtype, spec.item_bytes)

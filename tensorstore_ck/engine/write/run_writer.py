"""Runs of blocks on their way into packs: read, sampled, identified, encoded. Blocks that changed little are kept in memory."""

from collections.abc import Mapping, Sequence
from functools import partial

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine.interfaces import CapturedState, TensorBlock
from tensorstore_ck.engine.write.delta_bases import SPARSE_SHARE, Comparison, Fp32Masters, ParentBlocks
from tensorstore_ck.engine.write.pack_writer import BlockEncoding, PackWriter
from tensorstore_ck.engine.write.sampled_checks import CaptureSample, require_unchanged
from tensorstore_ck.format.codec import Coding, Encoder, elements_of
from tensorstore_ck.log.block_index import Base


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
        self._captured, self._packs, self._sample, self._ids = captured, packs, sample, ids
        self._coding, self._earlier, self._masters = coding, earlier, masters
        self._computed, self._must_agree = computed, must_agree
        self._specs, self._read = captured.layout.tensors[:], captured.read
        self.weights: Mapping[int, int] = masters.of if masters is not None else {}
        """The tensors that are stored as casts of others, which must be written first."""

    def store(self, run: Sequence[TensorBlock]) -> None:
        """Stores the blocks of a run, in order."""
        captured, earlier = self._captured, self._earlier
        buffers: list[Buffer] = []
        for block in run:
            data = self._read(block.tensor, block.start, block.stop)
            # A frozen tensor is read from its owner's memory: even if it changes now, a block's bytes must match its id.
            buffers.append(bytes(data) if block.tensor in captured.frozen else data)
        self._sample.note(run, buffers)
        little_changed: dict[int, Comparison] = {}
        encode = None
        if self._coding.mode != "raw" or earlier is not None:
            encode = partial(self._encode, encoder=Encoder(self._coding.mode), run=run, buffers=buffers, little_changed=little_changed)
        identify = partial(self._identify, earlier=earlier, run=run, buffers=buffers, little_changed=little_changed) if earlier else None
        for block, block_id in zip(run, self._packs.add(buffers, encode, identify), strict=True):
            self._ids[block.row] = block_id
            if self._computed.get(block.row, block_id) != block_id and self._must_agree:
                require_unchanged(captured, {block.tensor})
        if earlier is not None:
            for number, compared in little_changed.items():
                earlier.keep(self._ids[run[number].row], compared)

    def _identify(
        self,
        number: int,
        *,
        earlier: ParentBlocks,
        run: Sequence[TensorBlock],
        buffers: Sequence[Buffer],
        little_changed: dict[int, Comparison],
    ) -> Digest:
        """The id of a block of a run; compares it with the one before if that is in memory."""
        spec = self._specs[run[number].tensor]
        raw, elements = memoryview(buffers[number]).cast("B"), elements_of(spec.dtype, spec.item_bytes)
        digest, compared = earlier.identify(run[number].row, raw, elements)
        if compared is not None:
            little_changed[number] = compared
        return digest

    def _encode(
        self,
        number: int,
        *,
        encoder: Encoder,
        run: Sequence[TensorBlock],
        buffers: Sequence[Buffer],
        little_changed: dict[int, Comparison],
    ) -> BlockEncoding:
        """The stored form of a block of a run: a cast of its master, a difference to its base, or its own bytes."""
        block, raw, masters, earlier = run[number], buffers[number], self._masters, self._earlier
        spec = self._specs[block.tensor]
        elements = elements_of(spec.dtype, spec.item_bytes)
        if masters is not None and block.tensor in self.weights and (bases := masters.blocks(block)):
            cast = encoder.encode_cast(raw, [masters.read(base) for base in bases], spec.dtype)
            if cast is not None:
                little_changed.pop(number, None)
                return BlockEncoding(cast, tuple(Base(self._ids[base.row], None) for base in bases), len(bases))
        candidate = earlier.candidate(block.row, len(raw), little_changed.get(number)) if earlier is not None else None
        delta = encoder.encode_delta(raw, candidate.raw, elements, candidate.changes) if candidate is not None else None
        if candidate is not None and delta is not None:
            if delta.changes is None or sum(map(len, delta.encoded.pieces)) > SPARSE_SHARE * len(raw):
                little_changed.pop(number, None)  # the base of the next difference is another block
            elif number not in little_changed:
                little_changed[number] = candidate.patched(delta.changes)
            return BlockEncoding(delta.encoded, (candidate.base,), candidate.age)
        return BlockEncoding(encoder.encode_tensor(raw, elements))

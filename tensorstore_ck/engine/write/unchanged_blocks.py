"""Blocks on devices that the store has already. Devices compute their ids, and the host never reads them.

A block that is written is always hashed by the host, from the bytes that are written.
"""

from collections.abc import Mapping, MutableSequence, Sequence

from tensorstore_ck.common.ids import ZERO_DIGEST, Digest
from tensorstore_ck.engine.interfaces import CapturedState, TensorBlock
from tensorstore_ck.engine.write.pack_writer import PackWriter
from tensorstore_ck.engine.write.sampled_checks import CaptureSample
from tensorstore_ck.format.block_assignment import regions_of_rank


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
    are_there = packs.find(hashed_ids, [block.stop - block.start for block in hashed])
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

"""Copies deltas as plain blocks, since the target may lack their bases."""

from collections.abc import Callable, Mapping

from tensorstore_ck.common.ids import Digest, block_id
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.part_extents import chain_of, location_of
from tensorstore_ck.engine.reachability import BlockLocations
from tensorstore_ck.engine.read.block_reader import decode_at
from tensorstore_ck.engine.write.pack_writer import BlockEncoding, PackWriter
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import HEAD_BYTES, Encoder, elements_in
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.format.part import Part
from tensorstore_ck.maintenance.copy_store.blocks import Copied


def copy_decoded(
    source: Engine, target: Engine, part: Part, locations: BlockLocations, rows: Mapping[Digest, int], *, advance: Callable[[int], None]
) -> Copied:
    """Copies the blocks in these extent `rows`; all of them are durable when it returns.

    Raises:
        DamageError: a block, or one of its bases, is missing or damaged.
    """
    located = {block: location_of(part, locations.packs, locations.extents, row) for block, row in rows.items()}
    writer = PackWriter(target.backend, target.new_id, lambda _: {})

    def copy(block: Digest) -> None:
        location = located[block]
        name = pack_name(location.pack)
        raw = decode_at(source.backend, location)
        if block_id(raw) != block:
            raise CorruptObjectError(f"{name}: the block at offset {location.offset}, or one of its bases, is damaged", object_id=name)
        head = bytearray(min(location.stored, HEAD_BYTES))
        source.backend.read_into(name, location.offset, memoryview(head))
        writer.add([raw], lambda _: BlockEncoding(Encoder("fast").encode_tensor(raw, elements_in(location.codec, head))))
        advance(len(raw))

    try:
        for_each(located, copy, cpu_threads())
        writer.close()
    except BaseException:
        writer.abort()
        raise
    return Copied(writer.added, sum(each.stored for location in located.values() for each in chain_of(location)), writer.new_bytes)

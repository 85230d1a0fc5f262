"""Reads what changed: of a block that is a difference to one that the follower holds, the difference alone.

The stored bytes of all links of all chains are read in merged ranges, then each block is put together: a held block or the first stored
one, and differences in place. Each block is verified as a whole. What does not match, because somebody changed the tensors or the bytes
came wrong, is left to `read_at_places`, which takes everything from the store.
"""

import threading
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Final, NamedTuple

from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.ids import Digest, Ulid, block_hasher, block_id, derived_hash
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import location_of
from tensorstore_ck.engine.read.block_reader import MAX_GAP_BYTES, MERGE_BYTES, WantedBlock, deliver, read_at_places, read_blocks
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.feed.followed_tensor import FEW, FollowedTensor, SeveralTensors
from tensorstore_ck.feed.held_blocks import HeldBlocks
from tensorstore_ck.feed.shared_ranges import Range, Read, SharedRanges
from tensorstore_ck.format.codec import Codec, decode, decode_changes, visit_changed
from tensorstore_ck.format.pack import pack_name
from tensorstore_ck.log import SnapshotRow
from tensorstore_ck.log.block_index import Location

BATCH_BYTES: Final = 256 << 20
"""Stored bytes of chains in memory at a time."""


class Chain(NamedTuple):
    """How a block is put together."""

    block: WantedBlock
    base: Digest | None
    """A block that the follower holds; None: the last of `links` is whole."""
    links: Sequence[Location]
    """The block itself, what it is a difference to, and so on."""

    @property
    def stored_bytes(self) -> int:
        """Of all links."""
        return sum(link.stored for link in self.links)


class ChangesReader:
    """`ReadBlocks` for a follower."""

    def __init__(self, held: HeldBlocks, shared: SharedRanges | None = None) -> None:
        """`shared`: with other ranks for which `reads_of` is the same."""
        self._held = held
        self._shared = shared
        self._scratch = threading.local()
        self.read_bytes = 0
        """Stored bytes of the blocks that were read."""
        self.found_changed = False
        """Whether the tensors had other bytes than those of a held block."""

    def __call__(self, engine: Engine, info: SnapshotRow, wanted: Sequence[WantedBlock]) -> None:
        """See `read_blocks`."""
        read_blocks(engine, info, wanted, self._read)

    def reads_of(self, engine: Engine, wanted: Sequence[WantedBlock]) -> Digest:
        """Equal on ranks that would read the same bytes of packs, in the same batches."""
        chains, _ = self._chains(wanted, with_whole=True)
        links = [[(link.pack, link.offset, link.stored) for link in chain.links] for chain in chains]
        return derived_hash("reads of a follower", repr((engine.backend.is_local, links)).encode())

    def _read(self, engine: Engine, wanted: list[WantedBlock]) -> None:
        shared, self._shared = self._shared, None  # what is read again is read alone
        chains, whole = self._chains(wanted, with_whole=shared is not None)
        for batch in batches(chains, lambda chain: chain.stored_bytes, BATCH_BYTES):
            whole += self._put_together(engine, batch, shared)
        self.read_bytes += sum(block.stored for block in whole)
        read_at_places(engine, whole)

    def _chains(self, wanted: Sequence[WantedBlock], *, with_whole: bool) -> tuple[list[Chain], list[WantedBlock]]:
        """The blocks that are put together, in the order of their places; `with_whole`: with those of one link. Then the others."""
        codecs = {block.codec for block in wanted} - {Codec.CAST} if with_whole else {Codec.DELTA}
        chains = [self._chain(block) for block in wanted if block.codec in codecs]
        chains.sort(key=lambda chain: (chain.links[0].pack, chain.links[0].offset))
        return chains, [block for block in wanted if block.codec not in codecs]

    def _chain(self, block: WantedBlock) -> Chain:
        places = block.source.places
        links = [location_of(block.source.part, places.packs, places.extents, block.row)]
        while links[-1].codec == Codec.DELTA:
            (base,) = links[-1].bases
            if base.block in self._held:
                return Chain(block, base.block, links)
            assert base.location is not None  # of a part: its extents have the closure
            links.append(base.location)
        return Chain(block, None, links)

    def _put_together(self, engine: Engine, chains: Sequence[Chain], shared: SharedRanges | None) -> list[WantedBlock]:
        """Reads the chains' blocks and delivers them; returns those that are to be read in another way."""
        stored = self._fetch(engine, [link for chain in chains for link in chain.links], shared)
        failed: list[WantedBlock] = []

        def build(chain: Chain) -> None:
            if self._patch(chain, stored):
                return
            raw = self._decoded(chain, stored)
            if raw is None:
                failed.append(chain.block)
            else:
                deliver(chain.block.target, chain.block.start, raw)

        for_each(chains, build, min(cpu_threads(), len(chains)))
        return failed

    def _patch(self, chain: Chain, stored: Mapping[tuple[Ulid, int], memoryview]) -> bool:
        """Stages the elements that one difference changes in the place of its block, without a comparison; returns whether it did.

        The block is copied, changed and hashed piece by piece, in the core's cache.
        """
        block, target, (link, *others) = chain.block, chain.block.target, chain.links
        if chain.base is None or others or not isinstance(target, FollowedTensor | SeveralTensors):
            return False
        held = self._held.read_in_place(block, chain.base)
        if held is None or len(held) != block.raw:
            return False
        try:
            changes = decode_changes(stored[link.pack, link.offset], block.raw, pack_name(link.pack))
        except CorruptObjectError:
            return False
        if changes is None or changes.values.itemsize != target.item_bytes or changes.values.nbytes > FEW * block.raw:
            return False
        hasher = block_hasher()
        changed = visit_changed(changes, held, hasher.update)
        if changed is None or hasher.digest() != block.source.part.block_id(block.row):
            return False
        positions, old, new = changed
        target.change(block.start, positions, new=new, old=old)
        return True

    def _decoded(self, chain: Chain, stored: dict[tuple[Ulid, int], memoryview]) -> memoryview | None:
        """The verified bytes of a block; None if they are not what its id says."""
        links, block = list(chain.links), chain.block
        raw = self._memory(block.raw)
        try:
            if chain.base is not None:
                held = self._held.read(chain.base)
                if held is None or len(held) != len(raw):
                    self.found_changed |= held is not None
                    return None
                raw[:] = held
            else:
                first = links.pop()
                if first.raw != block.raw or first.codec == Codec.CAST:
                    return None
                raw[:] = decode(first.codec, stored[first.pack, first.offset], first.raw, pack_name(first.pack))
            for link in reversed(links):
                decode(link.codec, stored[link.pack, link.offset], block.raw, pack_name(link.pack), into=raw, bases=[raw])
        except CorruptObjectError:
            return None
        if block_id(raw) == block.source.part.block_id(block.row):
            return raw
        if chain.base is not None:
            self.found_changed = True
        return None

    def _memory(self, size_bytes: int) -> memoryview:
        """Memory of this thread, until it asks again: fresh pages take as long as hashing."""
        memory: memoryview | None = getattr(self._scratch, "memory", None)
        if memory is None or len(memory) < size_bytes:
            memory = self._scratch.memory = memoryview(bytearray(size_bytes))
        return memory[:size_bytes]

    def _fetch(self, engine: Engine, places: Sequence[Location], shared: SharedRanges | None) -> dict[tuple[Ulid, int], memoryview]:
        """The stored bytes of blocks, by pack and offset."""
        local = engine.backend.is_local

        def read(tasks: Sequence[Read]) -> None:
            self.read_bytes += sum(len(task.target) for task in tasks)
            threads = min(cpu_threads() if local else REMOTE_THREADS, len(tasks))
            for_each(tasks, lambda task: engine.backend.read_into(pack_name(task.place.pack), task.place.start, task.target), threads)

        by_place = sorted({(place.pack, place.offset): place for place in places}.values(), key=attrgetter("pack", "offset"))
        merged = list(_merged(by_place, max_gap_bytes=0 if local else MAX_GAP_BYTES))
        ranges = [place for place, _ in merged]
        fetched = None if shared is None else shared.fetch(ranges, read)
        if fetched is None:
            fetched = [memoryview(bytearray(place.stop - place.start)) for place in ranges]
            read([Read(*task) for task in zip(ranges, fetched, strict=True)])
        return {
            (place.pack, place.offset): data[place.offset - whole.start : place.offset - whole.start + place.stored]
            for (whole, members), data in zip(merged, fetched, strict=True)
            for place in members
        }


def _merged(places: Sequence[Location], max_gap_bytes: int) -> list[tuple[Range, list[Location]]]:
    """Groups sorted places that are worth reading together."""
    merged: list[tuple[Range, list[Location]]] = []
    for place in places:
        stop = place.offset + place.stored
        if merged:
            last, members = merged[-1]
            if place.pack == last.pack and place.offset - last.stop <= max_gap_bytes and stop - last.start <= MERGE_BYTES:
                members.append(place)
                merged[-1] = last._replace(stop=max(last.stop, stop)), members
                continue
        merged.append((Range(place.pack, place.offset, stop), [place]))
    return merged

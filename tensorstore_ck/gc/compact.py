"""Copies the live entries of sparse packs into new packs, which take effect with a `relocate` operation.

Every block is verified. A pack with a bad block stays as it is, for `tsck fsck --repair`.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import takewhile
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.backend.protocol import Backend, finishing
from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.executor import Executor
from tensorstore_ck.common.ids import DIGEST_BYTES, Digest, IdSource, Ulid, block_id
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.range_verifier import read_pack_ends
from tensorstore_ck.engine.reachability import Entries
from tensorstore_ck.engine.write.pack_writer import EncodedBlock, PackWriter
from tensorstore_ck.errors import CorruptObjectError, DamageError, NoSpaceError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, StoredBlock, decode
from tensorstore_ck.format.pack import PACK_LIMIT_BYTES, Footer, pack_name, stored_check
from tensorstore_ck.format.relocation import RELOCATION_DTYPE, RelocationMap
from tensorstore_ck.format.sealed import object_hash
from tensorstore_ck.gc.block_runs import cut_runs, span_bytes
from tensorstore_ck.gc.mark_reachable import LiveSet
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable
from tensorstore_ck.log.block_index import Base, Location

RUN_BYTES: Final = 8 << 20
MAX_GAP_BYTES: Final = RUN_BYTES // 64
MAX_OPEN_PACKS: Final = 4
COMPACT_BATCH_BYTES: Final = MAX_OPEN_PACKS * PACK_LIMIT_BYTES
"""The size of a batch that is copied as one piece: what a run has to copy again after Ctrl-C, a kill or a full disk. A smaller one would
not fill its packs."""
MOVES_AN_ENTRY: Final = 500
PIECE_BYTES: Final = 256 << 20
"""The bytes that a worker of a cluster copies at a time, so that its new packs are full."""

ReadRun = Callable[[Ulid, Footer, list[int]], list[StoredBlock]]
"""Returns verified blocks of neighbouring entries of a pack."""


class CompactedPack(NamedTuple):
    """A pack whose live entries were copied."""

    pack: Ulid
    ulid: Ulid
    """The relocation map: object under ``moved/``."""
    hash: Digest
    targets: tuple[Ulid, ...]
    entries: Entries
    """The copied entries, in order."""
    size_bytes: int
    """The size of the relocation map."""
    url: str | None = None
    """The location of the targets; None: the store's own location."""

    def operations(self, view: RefTable, needed: Entries) -> list[Op]:
        """Operations that commit the relocation at a head where `needed` entries of the pack are live; none if that is not allowed.

        Conditions (docs/decisions/004-gc-without-leases-and-clocks.md): the pack is unlisted, every live entry was copied, and neither
        the relocation map nor a target was swept. The caller checks the anchor.
        """
        own = [ObjectKey("moved", self.ulid), *(ObjectKey("pack", target) for target in self.targets)]
        states = {key: view.object_state(key) for key in own}
        if view.object_state(ObjectKey("pack", self.pack)) is not None or any(
            state is not None and state.swept for state in states.values()
        ):
            return []
        if not np.isin(needed, self.entries, assume_unique=True).all():
            return []
        condemned = Objects(key for key, state in states.items() if state is not None)
        relocate = Op.relocate(self.pack, self.ulid, self.hash, self.targets)
        move = [] if self.url is None else [Op.set_location(self.targets, self.url)]
        return [*move, relocate, Op.condemn(Objects([ObjectKey("pack", self.pack)])), *([Op.rescue(condemned)] if condemned else [])]


class Compacted(NamedTuple):
    """The result of `compact`."""

    moves: list[CompactedPack]
    written_bytes: int
    problems: list[str]
    """Why packs could not be read."""
    no_space: NoSpaceError | None
    """Why the packs that are in neither list were not copied."""


class CopiedPacks(NamedTuple):
    """The result for a piece."""

    packs: frozenset[Ulid]
    """The packs whose entries were all copied."""
    locations: dict[Digest, Location]
    """The durable locations of their blocks."""
    written_bytes: int
    problems: list[str]
    """Why other packs could not be read."""
    no_space: NoSpaceError | None = None


class SparsePack(NamedTuple):
    """A pack and the entries to copy from it, in order."""

    pack: Ulid
    footer: Footer
    entries: Entries
    size_bytes: int


def read_footer(backend: Backend, pack: Ulid, size_bytes: int) -> Footer:
    """The footer of a pack, in three small reads. Raises `DamageError` if it is missing or damaged."""
    name = pack_name(pack)
    return read_pack_ends(partial(backend.read_into, name), size_bytes, name).decoded


def read_sparse(backend: Backend, pack: Ulid, size_bytes: int, entries: Entries) -> SparsePack:
    """The pack with its footer; `DamageError` if that is missing, damaged or too short. Another pack with enough entries is not noticed."""
    footer = read_footer(backend, pack, size_bytes)
    if len(entries) and int(entries[-1]) >= len(footer.entries):
        name = pack_name(pack)
        raise CorruptObjectError(
            f"{name} has {len(footer.entries)} blocks, and snapshots need more of it: it is another pack", object_id=name
        )
    return SparsePack(pack, footer, entries, size_bytes)


def compact(
    engine: Engine,
    packs: Sequence[SparsePack],
    progress: Callable[[int], None] = lambda size: None,
    *,
    read: ReadRun | None = None,
    url: str | None = None,
    executor: Executor | None = None,
) -> Compacted:
    """Copies the given entries of each pack to `url`, by default the store's own location.

    `progress` is called with each number of bytes copied. `read` returns verified blocks of neighbouring entries; by default from the pack.
    `executor` copies pieces of about `PIECE_BYTES`; without one, a group of interchangeable packs is one piece, copied by the threads of
    this process. Without space, the result has the pieces that were copied.
    """
    target = engine.placed.at(url) if url is not None else engine.backend
    work = partial(copy_packs, engine.backend, target, engine.new_id, read=read)
    moves, written_bytes, problems = list[CompactedPack](), 0, list[str]()
    no_space: NoSpaceError | None = None
    groups = interchangeable(packs)
    pieces = takewhile(lambda _: no_space is None, (piece for group in groups for piece in batches(group, live_bytes, PIECE_BYTES)))
    in_turn = (work(group, progress=progress) for group in groups if no_space is None)
    for copied in executor.run(work, pieces) if executor is not None else in_turn:
        sources = [source for source in packs if source.pack in copied.packs]
        try:
            for source in sources:
                entries = source.entries.tolist()
                locations = [copied.locations[_block_id(source.footer, entry)] for entry in entries]
                moves.append(write_relocation(engine, pack=source.pack, entries=entries, locations=locations, url=url))
        except NoSpaceError as exc:
            no_space = exc
        if executor is not None:
            progress(sum(map(live_bytes, sources)))
        written_bytes += copied.written_bytes
        problems += copied.problems
        no_space = no_space or copied.no_space
    return Compacted(moves, written_bytes + sum(move.size_bytes for move in moves), problems, no_space)


def interchangeable(packs: Sequence[SparsePack]) -> list[list[SparsePack]]:
    """Groups of packs in each of which blocks that occur more than once are stored without bases, so that one copy serves all entries.

    A part knows the bases of its own copy: a difference in the place of a whole block, or of one to another base, could not be decoded.
    """
    if not packs:
        return []
    heads = [_id_heads(pack) for pack in packs]
    _, numbers, counts = np.unique(np.concatenate(heads), return_inverse=True, return_counts=True)
    codecs = np.concatenate([pack.footer.entries["codec"][pack.entries] for pack in packs])
    has_bases = np.isin(codecs, [int(codec) for codec in CODECS_WITH_BASES])
    may_conflict = np.zeros(len(counts), np.bool_)
    may_conflict[numbers[has_bases]] = True
    may_conflict &= counts > 1
    groups: list[tuple[list[SparsePack], set[int], set[int]]] = []
    ends = np.cumsum([len(own) for own in heads])[:-1]
    for pack, own, own_bases in zip(packs, np.split(numbers, ends), np.split(has_bases, ends), strict=True):
        is_shared = may_conflict[own]
        shared, based = set(own[is_shared].tolist()), set(own[is_shared & own_bases].tolist())
        for members, theirs, their_based in groups:
            if shared.isdisjoint(their_based) and based.isdisjoint(theirs):
                members.append(pack)
                theirs |= shared
                their_based |= based
                break
        else:
            groups.append(([pack], shared, based))
    return [members for members, _, _ in groups]


def _id_heads(pack: SparsePack) -> npt.NDArray[np.uint64]:
    """The first eight bytes of the ids of the entries to copy."""
    ids = np.ascontiguousarray(pack.footer.entries["id"][pack.entries])
    return np.ascontiguousarray(ids.view(np.uint8).reshape(len(ids), DIGEST_BYTES)[:, :8]).view(np.uint64).ravel()


def copy_packs(
    source: Backend,
    target: Backend,
    new_id: IdSource,
    packs: Sequence[SparsePack],
    *,
    read: ReadRun | None = None,
    progress: Callable[[int], None] = lambda size: None,
) -> CopiedPacks:
    """Copies the given entries of each pack into new packs of `target`; all of them are durable when it returns.

    Any worker may run it, and more than once: gc frees what it wrote if its result is not used.
    """
    writer = PackWriter(target, new_id, lambda _: {}, open_packs=min(cpu_threads(), MAX_OPEN_PACKS) if target.is_local else 1)
    problems: dict[Ulid, str] = {}
    lock = threading.Lock()
    buffers = threading.local()

    def from_pack(pack: Ulid, footer: Footer, run: list[int]) -> list[StoredBlock]:
        size_bytes = span_bytes(footer.entries[run])
        if len(getattr(buffers, "memory", b"")) < size_bytes:
            buffers.memory = memoryview(bytearray(max(size_bytes, RUN_BYTES)))
        return read_blocks(source, pack=pack, footer=footer, entries=run, memory=buffers.memory[:size_bytes])

    fetch = read or from_pack

    def copy(run: tuple[SparsePack, list[int]]) -> None:
        sparse, entries = run
        if sparse.pack in problems:
            return
        try:
            blocks = fetch(sparse.pack, sparse.footer, entries)
        except DamageError as exc:
            with lock:
                problems[sparse.pack] = str(exc)
            return
        pairs = zip(entries, blocks, strict=True)
        writer.add_encoded([_encoded(sparse.footer, entry, block) for entry, block in pairs])
        progress(int(sparse.footer.entries["stored"][entries].sum(dtype=np.int64)))

    try:
        with finishing(writer):
            for_each(_runs(packs), copy, cpu_threads() + 1 if source.is_local else REMOTE_THREADS)
    except NoSpaceError as exc:  # returned, as an error of one piece would end the others of a cluster
        return CopiedPacks(frozenset(), {}, 0, list(problems.values()), no_space=exc)
    copied = frozenset(sparse.pack for sparse in packs) - problems.keys()
    return CopiedPacks(copied, writer.added, writer.new_bytes, list(problems.values()))


def read_blocks(backend: Backend, pack: Ulid, footer: Footer, entries: list[int], memory: memoryview) -> list[StoredBlock]:
    """Reads neighbouring entries of a pack into `memory`, encoded as stored.

    Deltas are verified by their checksums, all other blocks by their ids.

    Raises:
        DamageError: the pack is truncated, or a block is damaged.
    """
    name = pack_name(pack)
    rows = footer.entries[entries]
    start = int(rows["offset"][0])
    backend.read_into(name, start, memory)
    blocks = []
    for block, offset, check, stored, raw_bytes, codec, _, _ in rows.tolist():
        data = memory[offset - start : offset - start + stored]
        sound = stored_check(data) == check if codec in CODECS_WITH_BASES else block_id(decode(codec, data, raw_bytes, name)) == block
        if not sound:
            raise CorruptObjectError(f"{name} holds a block that does not match its id", object_id=name)
        blocks.append(StoredBlock(Codec(codec), data, raw_bytes))
    return blocks


def live_bytes(pack: SparsePack) -> int:
    """Stored bytes of the entries to copy."""
    return int(pack.footer.entries["stored"][pack.entries].sum(dtype=np.int64))


def commit_relocations(engine: Engine, moves: Sequence[CompactedPack], live: LiveSet, anchor: int) -> set[Ulid]:
    """Commits relocations, checked at the head that the entry follows; `anchor`: the entry at which they were planned.

    Returns the relocated packs. Leaves out packs that need more entries by now, and packs that another process relocated.
    """

    def build(view: RefTable, batch: Sequence[CompactedPack]) -> list[Op]:
        live.update(view)
        if anchor < view.horizon():
            return []
        return [op for move in batch for op in move.operations(view, live.live_entries(move.pack))]

    moved: set[Ulid] = set()
    for at in range(0, len(moves), MOVES_AN_ENTRY):
        appended = engine.log.append(partial(build, batch=moves[at : at + MOVES_AN_ENTRY]))
        moved |= {op.fields["pack"] for op in appended.ops if op.name == "relocate"}
    return moved


def _encoded(footer: Footer, entry: int, block: StoredBlock) -> EncodedBlock:
    """The block for a new pack; that pack may lack the block's bases."""
    bases = tuple(Base(base, None) for base in footer.bases_of(entry)) if block.codec in CODECS_WITH_BASES else ()
    return EncodedBlock(id=_block_id(footer, entry), codec=block.codec, pieces=(block.stored,), raw_bytes=block.raw_bytes, bases=bases)


def _runs(sources: Sequence[SparsePack]) -> Iterator[tuple[SparsePack, list[int]]]:
    for source in sources:
        for run in cut_runs(source.footer.entries[source.entries], RUN_BYTES, MAX_GAP_BYTES):
            yield source, source.entries[run].tolist()


def write_relocation(
    engine: Engine, pack: Ulid, entries: Sequence[int], locations: Sequence[Location], url: str | None = None
) -> CompactedPack:
    """Writes the map that relocates entries of a pack, in order, to these locations of blocks, all in packs at `url`."""
    targets = sorted({location.pack for location in locations})
    numbers = {target: number for number, target in enumerate(targets)}
    rows = np.array(
        [
            (entry, numbers[location.pack], location.entry, location.stored, location.offset, location.codec, 0, 0)
            for entry, location in zip(entries, locations, strict=True)
        ],
        RELOCATION_DTYPE,
    )
    ulid, encoded = engine.new_id(), RelocationMap(pack, targets, rows, url).encode()
    engine.backend.put(ObjectKey("moved", ulid).name, encoded)
    return CompactedPack(
        pack=pack, ulid=ulid, hash=object_hash(encoded), targets=tuple(targets), entries=np.array(entries), size_bytes=len(encoded), url=url
    )


def _block_id(footer: Footer, entry: int) -> Digest:
    return Digest(footer.entries["id"][entry].tobytes())

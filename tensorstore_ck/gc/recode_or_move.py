"""Rewrites packs that are needed: smaller, or to another location. Each batch is committed by itself: a stopped run loses one.

The replaced packs are condemned; the next `gc` frees them. Roots never change, as block ids are hashes of raw bytes. Deltas are copied
as they are, and no block becomes a delta: a relocation never adds a base (docs/decisions/009-bounded-delta-chains.md).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.executor import Executor, LocalThreads
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.engine.reachability import Entries
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, Encoder, Mode, StoredBlock, decode
from tensorstore_ck.format.pack import Footer
from tensorstore_ck.gc.block_runs import span_bytes
from tensorstore_ck.gc.compact import (
    COMPACT_BATCH_BYTES,
    SparsePack,
    commit_relocations,
    compact,
    live_bytes,
    read_blocks,
    read_sparse,
)
from tensorstore_ck.gc.listing import ListedObject
from tensorstore_ck.gc.mark_reachable import LiveSet
from tensorstore_ck.gc.report import Progress, ProgressSum
from tensorstore_ck.log import ObjectKey, RefTable

BATCH_BYTES: Final = 16 << 30
"""The size of a batch of a cluster."""
CLUSTER_BATCH_BYTES: Final = 256 << 30
"""The same where the store cannot be full. A batch ends when its last piece is done: in a large batch few workers wait for that."""
LOOK_PACKS: Final = 16
"""Packs that a worker of a cluster looks at in one piece."""
SAMPLE_BLOCKS: Final = 8
"""Blocks of a pack that are encoded to estimate its new size."""
WORTH: Final = 0.97
"""A pack that would keep more than this share of its size is not rewritten."""
_OPAQUE: Final = frozenset({Codec.LZ4, Codec.ZSTD})


class Candidate(NamedTuple):
    """A pack that may be rewritten."""

    pack: Ulid
    size_bytes: int
    entries: Entries
    """The needed ones, in order."""


class PlannedPack(NamedTuple):
    """A pack to rewrite. Its footer is read when its turn comes: the footers of all packs take 80 bytes for each block of a store."""

    pack: Ulid
    size_bytes: int
    live_bytes: int
    """Stored bytes of its needed entries."""


class RepackPlan(NamedTuple):
    """Packs to rewrite, in order."""

    packs: list[PlannedPack]
    kept: list[Ulid]
    """Packs that would not get smaller."""
    after_bytes: int
    """The estimated size of `packs`."""
    notes: list[str]
    """Why packs could not be read."""


class RepackResult(NamedTuple):
    """Packs that were rewritten."""

    packs: list[PlannedPack]
    written_bytes: int
    """With relocation maps."""
    notes: list[str]
    """Why packs could not be read."""


def plan_repack(
    engine: Engine,
    live: LiveSet,
    candidates: Mapping[ObjectKey, ListedObject],
    *,
    mode: Mode | None,
    progress: Progress,
    executor: Executor | None = None,
) -> RepackPlan:
    """The packs that would get smaller by `mode`, estimated from some blocks of each; all that can be read if it is None.

    `executor` reads the packs; by default threads of this process.
    """
    looked = ProgressSum(progress, "looking at packs", len(candidates))
    listed = (Candidate(key.ulid, candidates[key].size_bytes, live.live_entries(key.ulid)) for key in sorted(candidates))
    pieces = batches(listed, lambda _: 1, LOOK_PACKS if executor is not None else 1)
    packs, kept, after_bytes, notes = list[PlannedPack](), list[Ulid](), 0, list[str]()
    for seen in (executor or LocalThreads(cpu_threads())).run(partial(look_at, engine.backend, mode), pieces):
        for pack, after, problem in seen:
            if problem is not None:
                notes.append(f"{ObjectKey('pack', pack.pack).name} was not changed: {problem}")
            elif mode is not None and after > WORTH * pack.live_bytes:
                kept.append(pack.pack)
            else:
                packs.append(pack)
                after_bytes += after
        looked.add(len(seen))
    return RepackPlan(sorted(packs), sorted(kept), after_bytes, sorted(notes))


class SeenPack(NamedTuple):
    """The result for a candidate."""

    pack: PlannedPack
    after_bytes: int
    """The estimated size of its needed entries after rewriting."""
    problem: str | None
    """Why it could not be read."""


def look_at(backend: Backend, mode: Mode | None, candidates: Sequence[Candidate]) -> list[SeenPack]:
    """Reads the footers of packs and, with `mode`, some blocks. Any worker may run it."""
    seen = []
    for pack, size_bytes, entries in candidates:
        try:
            sparse = read_sparse(backend, pack, size_bytes, entries)
            after_bytes = live_bytes(sparse) if mode is None else _after_bytes(backend, sparse, mode)
        except DamageError as exc:
            seen.append(SeenPack(PlannedPack(pack, size_bytes, 0), 0, str(exc)))
        else:
            seen.append(SeenPack(PlannedPack(pack, size_bytes, live_bytes(sparse)), after_bytes, None))
    return seen


def repack_packs(
    engine: Engine,
    live: LiveSet,
    packs: Iterable[PlannedPack],
    *,
    mode: Mode | None,
    url: str | None = None,
    progress: Callable[[int], None],
    executor: Executor | None = None,
) -> RepackResult:
    """Copies the needed entries of packs to `url`, by default the store's own location, and commits the relocations.

    Needed entries are determined again for each batch, which may be days later. `mode` encodes blocks again where that is smaller.
    `progress` is called with each number of bytes copied. `executor` copies them; by default this process does.

    Raises:
        NoSpaceError: there is no space for more copies. Those before are in force.
    """
    done = RepackResult([], 0, [])
    if url is not None:
        engine.placed.claim_new(url)
    for batch in batches(packs, attrgetter("live_bytes"), _batch_bytes(engine, executor)):
        anchor, left = at_newest(engine.log, partial(_still_needed, live, batch))
        opened = _open(engine, left, done.notes)
        read = None if mode is None else partial(_read_smaller, engine.backend, mode)
        compacted = compact(engine, packs=opened, progress=progress, read=read, url=url, executor=executor)
        moved = commit_relocations(engine, compacted.moves, live, anchor)
        done.packs.extend(PlannedPack(pack.pack, pack.size_bytes, live_bytes(pack)) for pack in opened if pack.pack in moved)
        done.notes.extend(compacted.problems)
        others = {move.pack for move in compacted.moves} - moved
        done.notes.extend(f"{ObjectKey('pack', pack).name} was not changed: other entries of it are needed now" for pack in sorted(others))
        done = done._replace(written_bytes=done.written_bytes + compacted.written_bytes)
        if compacted.no_space is not None:
            raise compacted.no_space
    return done


def _batch_bytes(engine: Engine, executor: Executor | None) -> int:
    if executor is None:
        return COMPACT_BATCH_BYTES
    return CLUSTER_BATCH_BYTES if engine.backend.space() is None else BATCH_BYTES


def _still_needed(live: LiveSet, packs: Iterable[PlannedPack], anchor: int, view: RefTable) -> tuple[int, list[Candidate]]:
    live.update(view)
    keys = [(pack, ObjectKey("pack", pack.pack)) for pack in packs]
    left = [pack for pack, key in keys if view.object_state(key) is None and live.needs(key)]
    return anchor, [Candidate(pack.pack, pack.size_bytes, live.live_entries(pack.pack)) for pack in left]


def _open(engine: Engine, packs: Sequence[Candidate], notes: list[str]) -> list[SparsePack]:
    """Reads the footers of packs; notes why those that are left out cannot be read."""
    opened: dict[Ulid, SparsePack] = {}

    def read(candidate: Candidate) -> None:
        pack, size_bytes, entries = candidate
        try:
            opened[pack] = read_sparse(engine.backend, pack, size_bytes, entries)
        except DamageError as exc:
            notes.append(f"{ObjectKey('pack', pack).name} was not changed: {exc}")

    for_each(packs, read, cpu_threads() if engine.backend.is_local else REMOTE_THREADS)
    return [opened[candidate.pack] for candidate in packs if candidate.pack in opened]


def _after_bytes(backend: Backend, pack: SparsePack, mode: Mode) -> int:
    """Estimates the new size of a pack's live entries from some that are not deltas."""
    rows = pack.footer.entries
    entries = pack.entries[~np.isin(rows["codec"][pack.entries], list(CODECS_WITH_BASES))]
    if not len(entries):
        return live_bytes(pack)
    picked = entries[np.unique(np.linspace(0, len(entries) - 1, SAMPLE_BLOCKS).astype(int))]
    after = sum(
        len(block.stored)
        for entry in picked.tolist()
        for block in _read_smaller(backend, mode=mode, pack=pack.pack, footer=pack.footer, run=[entry])
    )
    share = after / max(1, int(rows["stored"][picked].sum(dtype=np.int64)))
    return live_bytes(pack) - int((1 - share) * int(rows["stored"][entries].sum(dtype=np.int64)))


def _read_smaller(backend: Backend, mode: Mode, pack: Ulid, footer: Footer, run: list[int]) -> list[StoredBlock]:
    """Neighbouring entries of a pack, verified, re-encoded where that is smaller."""
    encoder, name = Encoder(mode), ObjectKey("pack", pack).name
    blocks = []
    for block in read_blocks(backend, pack, footer, run, memoryview(bytearray(span_bytes(footer.entries[run])))):
        if block.codec not in CODECS_WITH_BASES:
            raw = decode(block.codec, block.stored, block.raw_bytes, name)
            encoded = encoder.encode_opaque(raw) if block.codec in _OPAQUE else encoder.encode_unknown(raw)
            stored = memoryview(b"".join(encoded.pieces))
            if len(stored) < len(block.stored):
                blocks.append(StoredBlock(encoded.codec, stored, block.raw_bytes))
                continue
        blocks.append(block)
    return blocks

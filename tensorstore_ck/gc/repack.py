"""Rewrites packs that are needed: smaller, or to another location. Each batch is committed by itself, so a killed run loses one batch.

The replaced packs are condemned; the next `gc` frees them. Roots never change, as block ids are hashes of raw bytes. Deltas are copied
as they are, and no block becomes a delta: a relocation never adds a base (docs/decisions/009-bounded-delta-chains.md).
"""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.executor import Executor
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, Encoder, Mode, StoredBlock, decode
from tensorstore_ck.format.pack import Footer
from tensorstore_ck.gc.compact import SparsePack, commit_relocations, compact, live_bytes, read_blocks, read_footer
from tensorstore_ck.gc.listing import ListedObject
from tensorstore_ck.gc.mark_reachable import LiveSet
from tensorstore_ck.gc.report import Progress, ProgressSum
from tensorstore_ck.gc.runs import span_bytes
from tensorstore_ck.log import ObjectKey, RefTable

BATCH_BYTES: Final = 16 << 30
CLUSTER_BATCH_BYTES: Final = 256 << 30
"""The size of a batch where the store cannot be full. A batch ends when its last piece is done: in a large batch few workers wait for
that."""
SAMPLE_BLOCKS: Final = 8
"""Blocks of a pack that are encoded to estimate its new size."""
WORTH: Final = 0.97
"""A pack that would keep more than this share of its size is not rewritten."""
_OPAQUE: Final = frozenset({Codec.LZ4, Codec.ZSTD})


class RepackScan(NamedTuple):
    """Packs with their needed entries."""

    packs: list[SparsePack]
    notes: list[str]
    """Why packs could not be read."""


class RepackPlan(NamedTuple):
    """Packs that would get smaller."""

    packs: list[SparsePack]
    after_bytes: int
    """Their estimated size."""


class RepackResult(NamedTuple):
    """Packs that were rewritten."""

    packs: list[SparsePack]
    written_bytes: int
    """With relocation maps."""
    notes: list[str]
    """Why packs could not be read."""


def scan_packs(engine: Engine, live: LiveSet, candidates: Mapping[ObjectKey, ListedObject], progress: Progress) -> RepackScan:
    """Reads the footers of packs, and finds their needed entries."""
    sparse: dict[Ulid, SparsePack] = {}
    notes: list[str] = []
    looked = ProgressSum(progress, "looking at packs", len(candidates))

    def look(key: ObjectKey) -> None:
        try:
            footer = read_footer(engine.backend, key.ulid, candidates[key].size_bytes)
            sparse[key.ulid] = SparsePack(key.ulid, footer, live.live_entries(key.ulid), candidates[key].size_bytes)
        except DamageError as exc:
            notes.append(f"{key.name} was not changed: {exc}")
        looked.add(1)

    for_each(candidates, look, cpu_threads())
    return RepackScan([sparse[pack] for pack in sorted(sparse)], notes)


def plan_repack(engine: Engine, scan: RepackScan, mode: Mode, progress: Progress) -> RepackPlan:
    """The packs that would get smaller, estimated from some blocks of each."""
    after: dict[Ulid, int] = {}
    sampled = ProgressSum(progress, "sampling packs", len(scan.packs))

    def sample(pack: SparsePack) -> None:
        try:
            after_bytes = _after_bytes(engine, pack, mode)
        except DamageError as exc:
            scan.notes.append(f"{ObjectKey('pack', pack.pack).name} was not changed: {exc}")
        else:
            if after_bytes <= WORTH * live_bytes(pack):
                after[pack.pack] = after_bytes
        sampled.add(1)

    for_each(scan.packs, sample, cpu_threads())
    return RepackPlan([pack for pack in scan.packs if pack.pack in after], sum(after.values()))


def repack_packs(
    engine: Engine,
    live: LiveSet,
    packs: Iterable[SparsePack],
    *,
    mode: Mode | None,
    url: str | None = None,
    progress: Callable[[int], None],
    executor: Executor | None = None,
) -> RepackResult:
    """Copies the needed entries of packs to `url`, by default the store's own location, and commits the relocations.

    Needed entries are determined again for each batch, which may be days later. `mode` encodes blocks again where that is smaller.
    `progress` is called with each number of bytes copied. `executor` copies them; by default this process does.
    """
    done = RepackResult([], 0, [])
    if url is not None:
        engine.placed.claim_new(url)
    is_large = executor is not None and engine.backend.space() is None
    for batch in batches(packs, live_bytes, CLUSTER_BATCH_BYTES if is_large else BATCH_BYTES):
        anchor, left = at_newest(engine.log, partial(_still_needed, live, batch))
        read = None if mode is None else partial(_read_smaller, engine.backend, mode)
        compacted = compact(engine, packs=left, progress=progress, read=read, url=url, executor=executor)
        moved = commit_relocations(engine, compacted.moves, live, anchor)
        done.packs.extend(pack for pack in left if pack.pack in moved)
        done.notes.extend(compacted.problems)
        others = {move.pack for move in compacted.moves} - moved
        done.notes.extend(f"{ObjectKey('pack', pack).name} was not changed: other entries of it are needed now" for pack in sorted(others))
        done = done._replace(written_bytes=done.written_bytes + compacted.written_bytes)
    return done


def _still_needed(live: LiveSet, packs: Iterable[SparsePack], anchor: int, view: RefTable) -> tuple[int, list[SparsePack]]:
    live.update(view)
    keys = [(pack, ObjectKey("pack", pack.pack)) for pack in packs]
    left = [pack for pack, key in keys if view.object_state(key) is None and live.needs(key)]
    return anchor, [pack._replace(entries=live.live_entries(pack.pack)) for pack in left]


def _after_bytes(engine: Engine, pack: SparsePack, mode: Mode) -> int:
    """Estimates the new size of a pack's live entries from some that are not deltas."""
    rows = pack.footer.entries
    entries = pack.entries[~np.isin(rows["codec"][pack.entries], list(CODECS_WITH_BASES))]
    if not len(entries):
        return live_bytes(pack)
    picked = entries[np.unique(np.linspace(0, len(entries) - 1, SAMPLE_BLOCKS).astype(int))]
    after = sum(
        len(block.stored)
        for entry in picked.tolist()
        for block in _read_smaller(engine.backend, mode=mode, pack=pack.pack, footer=pack.footer, run=[entry])
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

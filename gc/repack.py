"""Rewrites packs whose blocks are needed: smaller, or elsewhere. In batches of which each is in force by itself, so that a run that is
killed loses one. What was replaced is condemned, and goes with the next `gc`.

Roots never change, as ids are of raw bytes. A block that is encoded against others is copied as it is, and none becomes one: a relocation
never adds a base (docs/decisions/009-bounded-delta-chains.md).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, Encoder, Mode, StoredBlock, decode
from tensorstore_ck.format.pack import Footer
from tensorstore_ck.gc.compact import SparsePack, compact, live_bytes, put_in_force, read_blocks, read_footer
from tensorstore_ck.gc.listing import ListedObject
from tensorstore_ck.gc.live_set import LiveSet, at_newest
from tensorstore_ck.gc.report import Progress, ProgressSum
from tensorstore_ck.log import ObjectKey, RefTable

BATCH_BYTES: Final = 16 << 30
SAMPLE_BLOCKS: Final = 8
"""Of a pack, to tell what it would become."""
WORTH: Final = 0.97
"""A pack that would not become smaller than this is left as it is."""
_OPAQUE: Final = frozenset({Codec.LZ4, Codec.ZSTD})


class RepackScan(NamedTuple):
    """Packs that were looked at."""

    packs: list[SparsePack]
    notes: list[str]
    """Those that could not be read, and why."""


class RepackPlan(NamedTuple):
    """Packs that would become smaller."""

    packs: list[SparsePack]
    after_bytes: int
    """What they would take."""


class RepackResult(NamedTuple):
    """What was done."""

    packs: list[SparsePack]
    written_bytes: int
    """Moved objects included."""
    notes: list[str]
    """Packs that could not be read, and why."""


def look_at(engine: Engine, reach: LiveSet, candidates: Mapping[ObjectKey, ListedObject], progress: Progress) -> RepackScan:
    """Packs, with those of their entries that are needed."""
    found: dict[Ulid, SparsePack] = {}
    notes: list[str] = []
    looked = ProgressSum(progress, "looking at packs", len(candidates))

    def look(key: ObjectKey) -> None:
        try:
            footer = read_footer(engine.backend, key.ulid, candidates[key].size_bytes)
            found[key.ulid] = SparsePack(key.ulid, footer, reach.live_entries(key.ulid), candidates[key].size_bytes)
        except DamageError as exc:
            notes.append(f"{key.name} was left as it is: {exc}")
        looked.add(1)

    for_each(candidates, look, cpu_threads())
    return RepackScan([found[pack] for pack in sorted(found)], notes)


def smaller(engine: Engine, found: RepackScan, mode: Mode, progress: Progress) -> RepackPlan:
    """Those packs that would become smaller, by some blocks of each."""
    after: dict[Ulid, int] = {}
    sampled = ProgressSum(progress, "sampling packs", len(found.packs))

    def sample(pack: SparsePack) -> None:
        try:
            after_bytes = _after_bytes(engine, pack, mode)
        except DamageError as exc:
            found.notes.append(f"{ObjectKey('pack', pack.pack).name} was left as it is: {exc}")
        else:
            if after_bytes <= WORTH * live_bytes(pack):
                after[pack.pack] = after_bytes
        sampled.add(1)

    for_each(found.packs, sample, cpu_threads())
    return RepackPlan([pack for pack in found.packs if pack.pack in after], sum(after.values()))


def rewrite(
    engine: Engine,
    reach: LiveSet,
    packs: Iterable[SparsePack],
    *,
    mode: Mode | None,
    place: str | None = None,
    progress: Callable[[int], None],
) -> RepackResult:
    """Copies the needed entries of packs, and puts the copies in force.

    Args:
        engine: The store.
        reach: What is needed.
        packs: Which; what is needed of each is looked up anew when its turn comes, as that may be days later.
        mode: How to encode them, where that is smaller; None: as they are.
        place: The URL where they are to lie, if not the store's own place.
        progress: Called with each number of bytes copied.
    """
    done = RepackResult([], 0, [])
    if place is not None:
        engine.placed.claim_new(place)
    for batch in _batches(packs):
        anchor, left = at_newest(engine, partial(_still_needed, reach, batch))
        compacted = compact(engine, left, progress, None if mode is None else partial(_read, engine, mode), place)
        moved = put_in_force(engine, compacted.moves, reach, anchor)
        done.packs.extend(pack for pack in left if pack.pack in moved)
        done.notes.extend(compacted.problems)
        others = {move.pack for move in compacted.moves} - moved
        done.notes.extend(f"{ObjectKey('pack', pack).name} was left as it is: it came to be needed otherwise" for pack in sorted(others))
        done = done._replace(written_bytes=done.written_bytes + compacted.written_bytes)
    return done


def _still_needed(reach: LiveSet, packs: Iterable[SparsePack], anchor: int, view: RefTable) -> tuple[int, list[SparsePack]]:
    reach.update(view)
    keys = [(pack, ObjectKey("pack", pack.pack)) for pack in packs]
    left = [pack for pack, key in keys if view.object_state(key) is None and reach.needs(key)]
    return anchor, [pack._replace(entries=reach.live_entries(pack.pack)) for pack in left]


def _batches(packs: Iterable[SparsePack]) -> Iterator[list[SparsePack]]:
    batch: list[SparsePack] = []
    batch_bytes = 0
    for pack in packs:
        size_bytes = live_bytes(pack)
        if batch and batch_bytes + size_bytes > BATCH_BYTES:
            yield batch
            batch, batch_bytes = [], 0
        batch.append(pack)
        batch_bytes += size_bytes
    if batch:
        yield batch


def _after_bytes(engine: Engine, pack: SparsePack, mode: Mode) -> int:
    """What the live entries of a pack would take, by some of those that can be decoded without others."""
    rows = pack.footer.entries
    entries = pack.entries[~np.isin(rows["codec"][pack.entries], list(CODECS_WITH_BASES))]
    if not len(entries):
        return live_bytes(pack)
    picked = entries[np.unique(np.linspace(0, len(entries) - 1, SAMPLE_BLOCKS).astype(int))]
    after = sum(len(block.stored) for entry in picked.tolist() for block in _read(engine, mode, pack.pack, pack.footer, [entry]))
    share = after / max(1, int(rows["stored"][picked].sum(dtype=np.int64)))
    return live_bytes(pack) - int((1 - share) * int(rows["stored"][entries].sum(dtype=np.int64)))


def _read(engine: Engine, mode: Mode, pack: Ulid, footer: Footer, run: list[int]) -> list[StoredBlock]:
    """Neighbouring entries of a pack, verified, each as it is or smaller."""
    rows = footer.entries[[run[0], run[-1]]]
    size_bytes = int(rows["offset"][1]) + int(rows["stored"][1]) - int(rows["offset"][0])
    encoder, name = Encoder(mode), ObjectKey("pack", pack).name
    found = []
    for block in read_blocks(engine.backend, pack, footer, run, memoryview(bytearray(size_bytes))):
        if block.codec not in CODECS_WITH_BASES:
            raw = decode(block.codec, block.stored, block.raw_bytes, name)
            encoded = encoder.encode_opaque(raw) if block.codec in _OPAQUE else encoder.encode_unknown(raw)
            stored = memoryview(b"".join(encoded.pieces))
            if len(stored) < len(block.stored):
                found.append(StoredBlock(encoded.codec, stored, block.raw_bytes))
                continue
        found.append(block)
    return found

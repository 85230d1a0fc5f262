"""Encodes cold snapshots anew, so that they take less: their packs are copied like sparse ones, block by block in the smallest form.

Roots never change, as ids are of raw bytes. A block that is encoded against others is copied as it is, and none becomes one: a relocation
has no place for a base (DESIGN section 4). Packs are done in batches of which each is in force by itself, so that a run that is killed
loses one. What was replaced is condemned, and goes with the next `gc`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.codec import BASED, Codec, Encoder, Mode, StoredBlock, decode
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import DamageError, UnsafeBackendError
from tensorstore_ck.gc.compact import SparsePack, compact, live_bytes, put_in_force, read_blocks, read_footer
from tensorstore_ck.gc.listing import Listed, list_objects
from tensorstore_ck.gc.reach import Reach, at_newest
from tensorstore_ck.gc.report import Progress, RewrittenPack, Summed
from tensorstore_ck.ids import Ulid
from tensorstore_ck.log import ObjectKey, RefTable, SnapshotInfo
from tensorstore_ck.pack import Footer
from tensorstore_ck.parallel import cpu_threads, for_each

BATCH_BYTES: Final = 16 << 30
SAMPLE_BLOCKS: Final = 8
"""Of a pack, to tell what it would become."""
WORTH: Final = 0.97
"""A pack that would not become smaller than this is left as it is."""
_OPAQUE: Final = frozenset({Codec.LZ4, Codec.ZSTD})


@dataclass(frozen=True, slots=True)
class RecodeReport:
    """What was done; in a dry run, what would be."""

    dry_run: bool
    snapshots: int
    """Those that were looked at."""
    kept: int
    """Their packs that would not become smaller."""
    rewritten: tuple[RewrittenPack, ...]
    before_bytes: int
    """What the live blocks of the rewritten packs took."""
    after_bytes: int
    """What they take now, moved objects included; in a dry run, judged by some blocks of each pack."""
    notes: tuple[str, ...]
    """Packs that could not be read, and why."""


def run_recode(
    engine: Engine,
    choose: Callable[[RefTable], Iterable[SnapshotInfo]],
    mode: Mode,
    *,
    dry_run: bool = False,
    progress: Progress = lambda what, done, total: None,
) -> RecodeReport:
    """Encodes the packs of chosen snapshots anew.

    Args:
        engine: The store.
        choose: Which snapshots, given the newest view.
        mode: How.
        dry_run: Only look.
        progress: Is told how it goes.

    Raises:
        UnreadableError: something that is held cannot be read, so that nobody knows which blocks of a pack are needed.
        UnsafeBackendError: the backend does not keep what the safety of relocations rests on.
    """
    if not dry_run:
        engine.require_writable()
    url = engine.backend.url
    if not engine.config.exclusive_create:
        raise UnsafeBackendError(f"{url} does not create objects exclusively: recode needs a total order of commits", object_id=url)
    listed = list_objects(engine.backend)
    part_sizes = {key.ulid: found.size_bytes for key, found in listed.items() if key.kind == "part"}
    reach = Reach(engine, part_sizes, lambda done, total: progress("marking snapshots", done, total))

    def look(anchor: int, view: RefTable) -> tuple[int, int, dict[ObjectKey, Listed]]:
        reach.update(view)
        chosen = list(choose(view))
        needed = {ObjectKey("pack", pack) for info in chosen for pack in reach.packs_of(view, info)}
        return anchor, len(chosen), {key: listed[key] for key in sorted(needed) if key in listed and view.object_state(key) is None}

    anchor, chosen, candidates = at_newest(engine, look)
    plan = _judge(engine, reach, candidates, mode, progress)
    rewritten, after = plan.packs, plan.after_bytes
    if not dry_run:
        rewritten, after = [], 0
        copied = Summed(progress, "rewriting packs", sum(map(live_bytes, plan.packs)))
        for batch in _batches(plan.packs):
            compacted = compact(engine, batch, copied.add, partial(_read, engine, mode))
            put_in_force(engine, compacted.moves, reach, anchor)
            moved = {move.pack for move in compacted.moves}
            rewritten += [pack for pack in batch if pack.pack in moved]
            plan.notes.extend(compacted.problems)
            after += compacted.written_bytes
    told = tuple(RewrittenPack(ObjectKey("pack", pack.pack).name, pack.size_bytes, live_bytes(pack)) for pack in rewritten)
    kept = len(candidates) - len(plan.packs)
    return RecodeReport(dry_run, chosen, kept, told, sum(map(live_bytes, rewritten)), after, tuple(plan.notes))


class _Plan(NamedTuple):
    packs: list[SparsePack]
    """Those that would become smaller."""
    after_bytes: int
    """What they would take."""
    notes: list[str]


def _judge(engine: Engine, reach: Reach, candidates: Mapping[ObjectKey, Listed], mode: Mode, progress: Progress) -> _Plan:
    found: dict[Ulid, tuple[SparsePack, int]] = {}
    notes: list[str] = []
    sampled = Summed(progress, "sampling packs", len(candidates))

    def judge(key: ObjectKey) -> None:
        try:
            footer = read_footer(engine.backend, key.ulid, candidates[key].size_bytes)
            pack = SparsePack(key.ulid, footer, reach.live_entries(key.ulid), candidates[key].size_bytes)
            after_bytes = _after_bytes(engine, pack, mode)
        except DamageError as exc:
            notes.append(f"{key.name} was left as it is: {exc}")
        else:
            if after_bytes <= WORTH * live_bytes(pack):
                found[key.ulid] = pack, after_bytes
        sampled.add(1)

    for_each(candidates, judge, cpu_threads())
    return _Plan([found[pack][0] for pack in sorted(found)], sum(after_bytes for _, after_bytes in found.values()), notes)


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
    entries = pack.entries[~np.isin(rows["codec"][pack.entries], list(BASED))]
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
        if block.codec not in BASED:
            raw = decode(block.codec, block.stored, block.raw_bytes, name)
            encoded = encoder.opaque(raw) if block.codec in _OPAQUE else encoder.unknown(raw)
            stored = memoryview(b"".join(encoded.pieces))
            if len(stored) < len(block.stored):
                found.append(StoredBlock(encoded.codec, stored, block.raw_bytes))
                continue
        found.append(block)
    return found

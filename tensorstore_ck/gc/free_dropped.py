"""Frees snapshots that a branch's policy dropped at its saves, without listing the store, so that a running job bounds its branch.

gc lists the store and judges every object. This file judges only the objects of the dropped snapshots, by the same rules and with the same
log entries. It leaves orphans, other branches and snapshots removed by `tsck forget` to gc.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.backend.reserve import fill_reserve
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import REMOTE_THREADS, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.errors import DamageError
from tensorstore_ck.gc.compact import live_bytes, read_sparse
from tensorstore_ck.gc.free_objects import OBJECTS_AN_ENTRY, changed_log, condemn, delete, truncate_tombstones
from tensorstore_ck.gc.mark_reachable import LiveSet, require_total_order
from tensorstore_ck.gc.options import GcOptions
from tensorstore_ck.gc.recode_or_move import PlannedPack, repack_packs
from tensorstore_ck.gc.released import Releases
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable

DEFAULTS: Final = GcOptions()


class FreedSnapshots(NamedTuple):
    """The result of `free_dropped`."""

    snapshots: int
    objects: int
    """Deleted ones: packs, parts, records, relocation maps."""
    rewritten_packs: int
    """Packs that were less than half needed: their needed blocks were copied."""


class _Dropped(NamedTuple):
    """The snapshots of a branch, at one entry, that nothing holds, and that this process released, or others before the undo window."""

    snapshots: int
    closure: LiveSet
    """The objects that they needed."""
    live: LiveSet
    """The objects that the roots need."""


def free_dropped(engine: Engine, ref: str) -> FreedSnapshots:
    """Ends the undo windows of snapshots that a branch's policy dropped at saves, and frees the objects that only these snapshots needed.

    Reads, on this host's first call, the records and parts of all live snapshots, and later those of new ones.

    Raises:
        UnreadableError: a held snapshot cannot be read, so what it needs is unknown.
        GcRefusedError: this user has not accepted a change of the log.
        UnsafeBackendError: the backend does not create objects exclusively.
    """
    engine.require_writable()
    engine = engine.freeing()
    require_total_order(engine, "gc")
    engine.log.verify()
    if engine.log.is_changed:
        raise changed_log(engine.backend.url)
    engine.placed.require_owner()
    releases = Releases(engine, DEFAULTS.undo_window_seconds, engine.clock())
    _end_undo_windows(engine, ref, releases)
    dropped = at_newest(engine.log, partial(_look, engine, ref, releases))
    if dropped is None:
        return FreedSnapshots(0, 0, 0)
    sparse = _sparse_packs(engine, dropped)
    objects = dropped.closure.objects()
    condemn(engine, dropped.live, [key for key in objects if not dropped.live.needs(key)])
    freed = _sweep(engine, dropped.live, {key for key in objects if key.kind == "pack"})  # before packs are rewritten: the disk may be full
    delete(engine, freed)
    rewritten = repack_packs(engine, dropped.live, sparse, mode=None, progress=lambda size: None).packs if sparse else []
    swept = _sweep(engine, dropped.live, objects)
    delete(engine, [key for key in swept if key not in freed])
    dropped.live.summaries.drop(swept)
    truncate_tombstones(engine, DEFAULTS.tombstone_seconds)
    fill_reserve(engine.backend)
    return FreedSnapshots(dropped.snapshots, len(swept), len(rewritten))


def _end_undo_windows(engine: Engine, ref: str, releases: Releases) -> None:
    """Ends the undo windows that saves of this process opened, and those that other saves opened long ago. The entry of such a window
    publishes a snapshot on the branch. A window that another one has just opened stays, because anybody can append such an entry.
    """
    engine.log.sync()
    entries = {window.n for window in engine.log.view().windows() if window.name == ref and window.kind == "snapshots"}
    by_save = {n for n in entries if releases.is_over(n) and _publishes(engine, n, ref)}

    def build(view: RefTable) -> list[Op]:
        return [Op.purge(window.n, ref) for window in view.windows() if window.name == ref and window.n in by_save]

    if by_save:
        engine.log.append(build)


def _publishes(engine: Engine, n: int, ref: str) -> bool:
    entry = engine.log.chain.read(n)
    return entry is not None and any(op.name == "put" and op.fields["ref"] == ref for op in entry.ops)


def _look(engine: Engine, ref: str, releases: Releases, _anchor: int, view: RefTable) -> _Dropped | None:
    infos = [info for info in view.snapshots(live=False) if info.ref == ref and releases.is_over(view.expired_at(info.ulid) or 0)]
    if not infos:
        return None
    closure, live = LiveSet(engine, None), LiveSet(engine, None)
    live.keep(releases)
    count = 0
    for info in infos:
        with suppress(DamageError):  # somebody else has begun to delete it, or gc reports the damage
            closure.add_snapshot(view, info)
            count += 1
    live.update(view)
    return _Dropped(count, closure, live)


def _sparse_packs(engine: Engine, dropped: _Dropped) -> list[PlannedPack]:
    """The packs of which less than half is needed now, and of which the dropped snapshots needed more."""
    locations = engine.placed.locations()
    sparse: list[PlannedPack] = []

    def judge(pack: Ulid) -> None:
        needed = dropped.live.live_entries(pack)
        if not len(np.setdiff1d(dropped.closure.live_entries(pack), needed, assume_unique=True)):
            return
        with suppress(DamageError):  # gc reports it
            size_bytes = engine.backend.size(ObjectKey("pack", pack).name)
            opened = read_sparse(engine.backend, pack, size_bytes, needed)
            needed_bytes = live_bytes(opened)
            if needed_bytes < DEFAULTS.compact_below * int(opened.footer.entries["stored"].sum(dtype=np.int64)):
                sparse.append(PlannedPack(pack, size_bytes, needed_bytes))

    packs = [key.ulid for key in dropped.closure.objects() if key.kind == "pack" and key.ulid not in locations and dropped.live.needs(key)]
    for_each(packs, judge, REMOTE_THREADS)
    return sorted(sparse)


def _sweep(engine: Engine, live: LiveSet, keys: set[ObjectKey]) -> Sequence[ObjectKey]:
    """Sweeps the condemned objects among `keys` that nothing needs, records last: after a kill, the next run finds the rest by their
    records. Returns those that are swept.
    """
    ordered = sorted(keys, key=lambda key: (key.kind == "snapshot", key))

    def build(view: RefTable) -> list[Op]:
        live.update(view)  # others may have condemned what is needed
        states = ((key, view.object_state(key)) for key in ordered if not live.needs(key))
        due = [key for key, state in states if state is not None and not state.swept]
        return [Op.sweep(Objects(due[:OBJECTS_AN_ENTRY]))] if due else []

    while engine.log.append(build).ops:
        pass
    view = engine.log.view()
    live.update(view)
    return [key for key in ordered if (state := view.object_state(key)) is not None and state.swept and not live.needs(key)]

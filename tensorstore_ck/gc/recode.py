"""Re-encodes the packs of chosen snapshots, so that they are smaller."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from tensorstore_ck.common.executor import Executor
from tensorstore_ck.common.units import human_bytes, parse_seconds
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.format.codec import check_recode_mode
from tensorstore_ck.gc.listing import ListedObject, list_objects, part_sizes
from tensorstore_ck.gc.mark_reachable import LiveSet, require_total_order
from tensorstore_ck.gc.recode_or_move import plan_repack, repack_packs
from tensorstore_ck.gc.report import Progress, ProgressSum, RewrittenPack, ignore_progress
from tensorstore_ck.log import ObjectKey, RefTable, SnapshotRow
from tensorstore_ck.log.address import resolve


@dataclass(frozen=True, slots=True)
class RecodeReport:
    """The result of a re-encoding; in a dry run, the result that it would have."""

    dry_run: bool
    snapshots: int
    """Snapshots that were chosen."""
    kept: int
    """The number of their packs that would not get smaller."""
    rewritten: tuple[RewrittenPack, ...]
    before_bytes: int
    """Stored bytes of the live blocks of the rewritten packs, before."""
    after_bytes: int
    """After, with relocation maps; in a dry run, estimated from some blocks of each pack."""
    notes: tuple[str, ...]
    """Why packs could not be read."""

    def __repr__(self) -> str:
        sizes = f"{human_bytes(self.before_bytes)} -> {human_bytes(self.after_bytes)}"
        dry = "dry run, " if self.dry_run else ""
        return f"RecodeReport({dry}{self.snapshots:,} snapshots, {len(self.rewritten):,} packs, {sizes})"


def recode_snapshots(
    engine: Engine,
    addresses: Collection[str],
    *,
    codec: str,
    older_than: "str | float | None" = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> RecodeReport:
    """Re-encodes the history of a branch, the snapshot at another address, or without addresses all held snapshots. See `Store.recode`.

    Packs at other locations stay as they are. `executor` reads and re-encodes the packs; by default this process does.

    Raises:
        UnreadableError: a held snapshot cannot be read, so which blocks of a pack are needed is unknown.
        UnsafeBackendError: the backend does not create objects exclusively.
    """
    mode, progress = check_recode_mode(codec), progress or ignore_progress
    before_ns = engine.clock() - int(parse_seconds(older_than, "older_than") * 1e9) if older_than is not None else None

    def at(view: RefTable, address: str) -> Iterable[SnapshotRow]:
        return view.history(address) if view.branch(address) is not None else [resolve(view, address).info]

    def choose(view: RefTable) -> list[SnapshotRow]:
        addressed = {info.ulid: info for address in addresses for info in at(view, address)}
        chosen = addressed.values() if addresses else view.snapshots()
        return [info for info in chosen if before_ns is None or info.time_ns <= before_ns]

    if not dry_run:
        engine.require_writable()
    require_total_order(engine, "recode")
    listed = list_objects(engine.backend)
    live = LiveSet(engine, part_sizes(listed), lambda done, total: progress("marking snapshots", done, total))

    def look(_: int, view: RefTable) -> tuple[int, dict[ObjectKey, ListedObject]]:
        live.update(view)
        chosen = choose(view)
        needed = {ObjectKey("pack", pack) for info in chosen for pack in live.packs_of(view, info)}
        here = needed - {ObjectKey("pack", pack) for pack in view.locations()}
        return len(chosen), {key: listed[key] for key in sorted(here) if key in listed and view.object_state(key) is None}

    chosen, candidates = at_newest(engine.log, look)
    plan = plan_repack(engine, live, candidates, mode=mode, progress=progress, executor=executor)
    rewritten, after, notes = plan.packs, plan.after_bytes, plan.notes
    if not dry_run:
        copied = ProgressSum(progress, "rewriting packs", sum(pack.live_bytes for pack in plan.packs))
        done = repack_packs(engine, live, plan.packs, mode=mode, progress=copied.add, executor=executor)
        rewritten, after, notes = done.packs, done.written_bytes, [*notes, *done.notes]
    packs = tuple(RewrittenPack(ObjectKey("pack", pack.pack).name, pack.size_bytes, pack.live_bytes) for pack in rewritten)
    kept, before = len(candidates) - len(plan.packs), sum(pack.live_bytes for pack in rewritten)
    return RecodeReport(dry_run, chosen, kept, packs, before_bytes=before, after_bytes=after, notes=tuple(notes))

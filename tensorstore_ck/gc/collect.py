"""One run of gc: mark, plan, end undo windows and pins that ran out, condemn, sweep, delete, compact, truncate tombstones.

PROTOCOL.md says why that is safe. Several hosts may run gc at once, alongside writers and readers, and a run may be killed anywhere:
the lists are in the log, so the next run continues with them. Clocks decide only when something begins. gc carries out accepted plans only;
a refused run changes nothing, except that the log notes it.
"""

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from tensorstore_ck.backend.reserve import fill_reserve, has_reserve, within_reserve
from tensorstore_ck.common.buffers import batches
from tensorstore_ck.common.executor import Executor, require_no_rate
from tensorstore_ck.common.ids import Ulid, ulid_text
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import GcRefusedError, NoSpaceError, StoreError, UnsafeBackendError
from tensorstore_ck.gc.compact import COMPACT_BATCH_BYTES, SparsePack, commit_relocations, compact, live_bytes
from tensorstore_ck.gc.free_objects import DELETE_BATCH, OBJECTS_AN_ENTRY, changed_log, condemn, delete, truncate_tombstones
from tensorstore_ck.gc.mark_reachable import LiveSet
from tensorstore_ck.gc.options import GcOptions
from tensorstore_ck.gc.plan import GcPlan, Planner, simulate, written_bytes
from tensorstore_ck.gc.report import GcReport, GoneSnapshot, Progress, ProgressSum, RewrittenPack, ignore_progress
from tensorstore_ck.log import FOLDERS, ObjectKey, Objects, Op, RefTable

_logger: Final = logging.getLogger("tensorstore_ck.gc")
ENDINGS_AN_ENTRY: Final = 500
"""Together with the objects of the same entry, well below the limit of 1 MB."""
CLUSTER_BATCH_BYTES: Final = 64 << 30
"""The size of a batch where the store cannot be full. A batch that fails leaves its copies for a later gc."""
SPARE_BYTES: Final = 1 << 20
"""Rewriting packs leaves this much free for entries of the log, where there is no reserve. A disk with less counts as full."""
MAX_CLOCK_SECONDS: Final = 300


def run_gc(
    engine: Engine,
    options: GcOptions | None = None,
    *,
    dry_run: bool = False,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> GcReport:
    """Frees what nothing holds; with `dry_run` only reports it. `executor` rewrites sparse packs; by default this process does.

    Raises:
        UnreadableError: a held snapshot cannot be read, so what it needs is unknown.
        GcRefusedError: more than `options.max_delete` would be deleted, or the backend's clock is too far from this host's.
        UnsafeBackendError: the backend does not create objects exclusively.
        InvalidOptionError: `options.rate_limit` is not a rate, or there is one with a remote executor.
    """
    options = options or GcOptions()
    require_no_rate(options.rate_limit, executor)
    return _Gc(engine.freeing().limited_to(options.rate_limit), options, dry_run, progress or ignore_progress, executor=executor).run()


class _Gc:
    def __init__(self, engine: Engine, options: GcOptions, dry_run: bool, progress: Progress, executor: Executor | None) -> None:
        self._engine = engine
        self._executor = executor
        self._options = options
        self._dry_run = dry_run
        self._progress = progress
        self._planner = Planner(engine, options, progress)
        self._notes = self._planner.notes
        self._accepted: set[tuple[object, ...]] = set()
        """The planned ends of undo windows and pins."""
        self._deleted: set[ObjectKey] = set()

    def run(self) -> GcReport:
        if not self._dry_run:
            self._engine.require_writable()
            self._engine.log.verify()
        planner = self._planner
        plan = planner.make()
        refusal = self._refusal(plan)
        _logger.debug(
            "%d objects; %d snapshots expired; %d objects unreachable, %d too young; %d sparse packs; %d windows and pins end; %s",
            *(len(plan.listed), len(plan.expired), len(plan.garbage), len(plan.young), len(plan.sparse), len(plan.ending)),
            f"refused: {refusal}" if refusal else "dry run" if self._dry_run else "goes on",
        )
        if self._dry_run:
            return self._report(plan, deleted=plan.doomed, rewritten=plan.sparse, written_bytes=written_bytes(plan.sparse), refusal=refusal)
        if refusal is not None:
            raise refusal
        self._engine.placed.require_owner()
        self._accepted = {tuple(op.fields.values()) for op in plan.ending}
        self._delete(plan.listed)  # frees what earlier runs swept: on a full disk, the entries of this run need the space
        self._condemn(plan)
        self._delete(plan.listed)
        moved, new_bytes = self._compact(plan.sparse)
        truncate_tombstones(self._engine, self._options.tombstone_seconds, still_listed=plan.listed.keys() - self._deleted)
        self._engine.backend.delete(plan.useless_records)
        fill_reserve(self._engine.backend)
        planner.live.summaries.prune()
        self._delete_checkpoints()
        return self._report(plan, self._deleted, moved, new_bytes)

    def _delete_checkpoints(self) -> None:
        try:
            spare = self._engine.log.spare_checkpoints()
            _logger.debug("deleting %d old checkpoints of the log", len(spare))
            self._engine.backend.delete(spare)
        except StoreError as exc:
            self._notes.append(f"old checkpoints of the log stay: {exc}")

    def _refusal(self, plan: GcPlan) -> StoreError | None:
        """Why gc must not carry out the plan."""
        url = self._engine.backend.url
        if not self._engine.config.exclusive_create:
            return UnsafeBackendError(f"{url} does not create objects exclusively: gc needs a total order of commits", object_id=url)
        if self._engine.log.is_changed:
            return changed_log(url)
        if (head := plan.view.head()) is None or head.n == 0:
            records = sum(key.kind == "snapshot" for key in plan.garbage)
            if records:
                return GcRefusedError(
                    f"the log of {url} is empty, but there are {records} snapshot records: if the log was lost, `tsck salvage` makes a new "
                    "one from them; if the first saves were interrupted, publish a snapshot, and gc frees the records"
                )
        if plan.unnamed:
            return GcRefusedError(
                f"no log entry names the parents of {len(plan.unnamed)} snapshot records, such as {plan.unnamed[0].name}: the log of {url} "
                "was lost, and began again. `tsck salvage` makes a new log with these snapshots. If none of them is wanted, delete "
                "these records, and gc frees the rest",
                object_id=plan.unnamed[0].name,
            )
        # Comparing clocks writes a probe: a read-only store skips it, as a real run compares them.
        apart = self._clock_gap_seconds() if self._relies_on_clock(plan) and not self._engine.read_only else 0
        if apart > MAX_CLOCK_SECONDS:
            return GcRefusedError(
                f"the clocks of this host and of {url} are {apart} s apart, so the ages of objects, undo windows and pins are unknown: "
                "set this host's clock"
            )
        going = sum(plan.listed[key].size_bytes for key in plan.doomed) - written_bytes(plan.sparse)
        total = sum(listed.size_bytes for listed in plan.listed.values())
        if going > self._options.max_delete * total:
            return GcRefusedError(
                f"{going} of {total} bytes ({going / total:.0%}) would be deleted, more than {self._options.max_delete:.0%}: "
                f"look at it with a dry run, and allow it with max_delete (`{plan.freeable.command}`)"
            )
        return None

    def _relies_on_clock(self, plan: GcPlan) -> bool:
        """Whether an age or a date decides anything. An undo window of zero length ends at any time."""
        dated = any(op.name != "purge" or self._options.undo_window_seconds > 0 for op in plan.ending)
        return dated or self._options.min_age_seconds > 0 or self._options.grace_seconds > 0

    def _clock_gap_seconds(self) -> int:
        """Difference between the backend's clock and this host's, measured with a probe object."""
        backend, name = self._engine.backend, f"probe/{ulid_text(self._engine.new_id())}"
        try:
            within_reserve(backend, lambda: backend.put(name, b""))
            try:
                modified = [info.modified_ns for info in backend.list("probe/") if info.name == name]
            finally:
                backend.delete([name])
        except StoreError as exc:
            if not self._dry_run:
                raise
            self._notes.append(f"the clocks of this host and of {backend.url} were not compared: {exc}")
            return 0
        return abs(self._engine.clock() - modified[0]) // 1_000_000_000 if modified else 0

    def _condemn(self, plan: GcPlan) -> None:
        """Ends the planned undo windows and pins, unless somebody has undone or extended them; condemns; sweeps what is due.

        Writes one entry on a full disk. Elsewhere each step is an entry: if one is lost, salvage still learns from the others what was
        freed.
        """
        space = self._engine.backend.space()
        is_full = space is not None and space.free_bytes < SPARE_BYTES
        if len(self._accepted) > (ENDINGS_AN_ENTRY if is_full else 0):
            while len(self._engine.log.append(lambda view: self._ending(view)[:ENDINGS_AN_ENTRY]).ops) == ENDINGS_AN_ENTRY:
                pass
        condemn(
            self._engine,
            self._planner.live,
            plan.garbage,
            ending=self._ending,
            due=self._due if is_full and not self._options.grace_seconds else None,
        )
        self._sweep()

    def _ending(self, view: RefTable) -> list[Op]:
        """The planned ends of undo windows and pins that are still to come."""
        return [op for op in self._planner.ending(view) if tuple(op.fields.values()) in self._accepted] if self._accepted else []

    def _live_at(self, view: RefTable) -> LiveSet:
        """The objects that are needed at `view` once the planned holds have ended."""
        ending = self._ending(view)
        self._planner.live.update(simulate(view, ending) if ending else view)
        return self._planner.live

    def _compact(self, packs: Sequence[SparsePack]) -> tuple[list[SparsePack], int]:
        """Copies the live entries of packs, each within its own location; returns the packs that were replaced, and the bytes written.

        Frees each batch before the next one is written.
        """
        copied = ProgressSum(self._progress, "rewriting packs", sum(map(live_bytes, packs)))
        locations = self._engine.placed.locations()
        done, new_bytes, left = list[SparsePack](), 0, 0
        for url in sorted({locations.get(pack.pack) for pack in packs}, key=str):
            executor = self._executor if url is None else None  # workers cannot open other locations
            is_large = executor is not None and self._engine.backend.space() is None
            batch_bytes = CLUSTER_BATCH_BYTES if is_large else COMPACT_BATCH_BYTES
            for batch in batches([pack for pack in packs if locations.get(pack.pack) == url], live_bytes, batch_bytes):
                fitting = self._fitting(batch, url)
                left += len(batch) - len(fitting)
                compacted = compact(self._engine, fitting, copied.add, url=url, executor=executor)
                if compacted.no_space is not None:
                    left += len(fitting) - len(compacted.moves) - len(compacted.problems)
                _logger.debug("compacted %d of %d packs of %s", len(compacted.moves), len(batch), url or "the store")
                self._notes.extend(compacted.problems)
                if not compacted.moves:
                    continue
                moved = set[Ulid]()
                try:
                    moved = commit_relocations(self._engine, compacted.moves, self._planner.live, self._planner.anchor)
                    self._sweep()
                except NoSpaceError:  # of an entry; what does not need one is still done
                    left += 0 if moved else len(compacted.moves)
                new_bytes += compacted.written_bytes
                done += [pack for pack in fitting if pack.pack in moved]
                self._delete(ObjectKey("pack", pack) for pack in moved)
        if left:
            self._notes.append(f"{left} sparse packs were not rewritten: there is no space for copies of their live blocks")
        return done, new_bytes

    def _fitting(self, packs: Sequence[SparsePack], url: str | None) -> Sequence[SparsePack]:
        """The first packs whose copies fit: an incomplete copy would be an orphan that fills the disk."""
        backend = self._engine.backend if url is None else self._engine.placed.at(url)
        space = backend.space()
        if space is None:
            return packs
        free_bytes = space.free_bytes - (0 if has_reserve(self._engine.backend) and url is None else SPARE_BYTES)
        return packs[: sum(written_bytes(packs[:count]) <= free_bytes for count in range(1, len(packs) + 1))]

    def _due(self, view: RefTable) -> list[ObjectKey]:
        live = self._live_at(view)  # others may have condemned what is needed
        return [key for key, state in view.objects() if not state.swept and self._planner.is_due(state.n) and not live.needs(key)]

    def _sweep(self) -> None:
        left = True

        def build(view: RefTable) -> list[Op]:
            nonlocal left
            due = self._due(view)
            left = len(due) > OBJECTS_AN_ENTRY
            return [Op.sweep(Objects(due[:OBJECTS_AN_ENTRY]))] if due else []

        while left:
            self._engine.log.append(build)

    def _delete(self, keys: Iterable[ObjectKey]) -> None:
        """Deletes the objects among `keys` that the log calls swept, and that nothing needs: a sweep alone proves nothing."""
        view = self._engine.log.view()
        live = self._live_at(view)
        states = ((key, view.object_state(key)) for key in keys if key not in self._deleted)
        dead = sorted(key for key, state in states if state is not None and state.swept and not live.needs(key))
        _logger.debug("delete %s", ", ".join(key.name for key in dead) or "nothing")
        delete(self._engine, dead, ProgressSum(self._progress, "deleting objects", len(dead)).add)
        self._deleted.update(dead)

    def _report(
        self,
        plan: GcPlan,
        deleted: Collection[ObjectKey],
        rewritten: Sequence[SparsePack],
        written_bytes: int,
        refusal: StoreError | None = None,
    ) -> GcReport:
        going = set(deleted)
        gone = [info for info in plan.expired if ObjectKey("snapshot", info.ulid) in going]
        view = plan.view if self._dry_run else self._engine.log.view()
        waiting = len(plan.garbage) + len(plan.sparse) if self._options.grace_seconds and self._dry_run else 0
        waiting += sum(not state.swept and key not in going for key, state in view.objects())
        batch = 1 if self._engine.backend.is_local else DELETE_BATCH
        writes = sum(2 + live_bytes(pack) // (8 << 20) for pack in rewritten)
        return GcReport(
            dry_run=self._dry_run,
            snapshots=tuple(GoneSnapshot(ulid_text(info.ulid), info.root.hex(), info.ref, info.step) for info in gone),
            deleted={kind: sum(key.kind == kind for key in deleted) for kind in FOLDERS},
            deleted_bytes=sum(plan.listed[key].size_bytes for key in deleted),
            rewritten=tuple(RewrittenPack(ObjectKey("pack", pack.pack).name, pack.size_bytes, live_bytes(pack)) for pack in rewritten),
            written_bytes=written_bytes,
            waiting=waiting,
            young=len(plan.young),
            total_bytes=sum(listed.size_bytes for listed in plan.listed.values()),
            requests=self._planner.requests + -(-len(deleted) // batch) + writes,
            notes=tuple(self._notes),
            refused=None if refusal is None else str(refusal),
            command=plan.freeable.command,
            later=plan.freeable.later,
        )

"""The objects that the roots need at one log entry, and those that were released within the undo window: a bit for each entry of each pack,
and the small objects by name.

While no relocation begins or ends, an update only adds what new roots need. The set may then hold more than the newest roots need,
so some objects are freed by the next run only.
"""

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import REMOTE_THREADS, cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import Entries, follow
from tensorstore_ck.errors import (
    CorruptObjectError,
    DamageError,
    MissingObjectError,
    SnapshotExpiredError,
    UnreadableError,
    UnsafeBackendError,
)
from tensorstore_ck.gc.live_bits import LiveBits, read_summaries
from tensorstore_ck.gc.part_summary import PartSummary, SummaryCache
from tensorstore_ck.gc.released import Released, Releases
from tensorstore_ck.gc.roots import how_to_release, roots
from tensorstore_ck.log import ObjectKey, RefTable, SnapshotRow


def require_total_order(engine: Engine, what: str) -> None:
    """Checks that a live set stays complete while `what` runs.

    Raises:
        UnsafeBackendError: the backend does not create objects exclusively.
    """
    if not engine.config.exclusive_create:
        url = engine.backend.url
        raise UnsafeBackendError(f"{url} does not create objects exclusively: {what} needs a total order of commits", object_id=url)


class RootNeeds:
    """Everything that some roots need."""

    def __init__(self, marks: LiveBits, objects: set[ObjectKey]) -> None:
        self._marks = marks
        self._objects = objects
        """Records, parts and relocation maps."""

    def needs(self, key: ObjectKey) -> bool:
        """Whether a root needs an object."""
        return key.ulid in self._marks.packs if key.kind == "pack" else key in self._objects

    def live_entries(self, pack: Ulid) -> Entries:
        """The needed entries of a pack, in order."""
        return self._marks.live_entries(pack)


class LiveSet(RootNeeds):
    """The closure of all roots."""

    def __init__(
        self, engine: Engine, part_sizes: Mapping[Ulid, int] | None, progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """`part_sizes`: the listed parts and their sizes. Uses cached summaries of these parts only; None: all cached summaries."""
        self._engine = engine
        self._progress = progress
        self._lock = threading.Lock()
        self.summaries = SummaryCache(engine.table, part_sizes)
        self._releases: Releases | None = None
        self._relocations: tuple[frozenset[tuple[Ulid, Ulid]], frozenset[Ulid]] = frozenset(), frozenset()
        """(all relocations, doubted maps)"""
        self._relocated: frozenset[Ulid] = frozenset()
        self._snapshots: set[Ulid] = set()
        super().__init__(LiveBits(), set())

    def frozen(self) -> RootNeeds:
        """A copy that later updates do not change. It costs a bit of memory per stored block."""
        return RootNeeds(self._marks.copy(), set(self._objects))

    def keep(self, releases: Releases) -> None:
        """From the next update on adds what was released within the undo window, as far as it can be read."""
        self._releases = releases

    def update(self, view: RefTable) -> None:
        """Adds what the roots of `view` need.

        Raises:
            UnreadableError: an object that a root needs cannot be read, so what else is needed is unknown.
        """
        released = self._released_at(view)
        while True:
            try:
                self._update(view, released)
            except UnreadableError:
                there = self._released_at(view)
                if there.is_same(released):
                    raise
                released = there  # gc of another host has deleted some of what it had swept
            else:
                return

    def _released_at(self, view: RefTable) -> Released:
        return Released() if self._releases is None else self._releases.at(view)

    def _update(self, view: RefTable, released: Released) -> None:
        view = released.restored(view)
        self._set_relocations(view, released.doubted)
        new = sorted(roots(view).keys() - self._snapshots)  # oldest first: packs then grow in place
        done = 0

        def add(ulid: Ulid) -> None:
            nonlocal done
            self._add(view, ulid)
            with self._lock:
                done += 1
                self._progress(done, len(new))

        for_each(new, add, cpu_threads() if self._engine.backend.is_local else REMOTE_THREADS)
        for info in released.snapshots:
            if info.ulid not in self._snapshots:
                with suppress(MissingObjectError, CorruptObjectError, SnapshotExpiredError):  # nothing can restore it
                    self._add_snapshot(view, info)
        self.summaries.flush()

    def packs_of(self, view: RefTable, info: SnapshotRow) -> set[Ulid]:
        """The packs that hold the blocks of a snapshot now. Reads only parts that have no cached summary.

        Raises:
            DamageError: its record, a part or a relocation map cannot be read.
        """
        packs: set[Ulid] = set()
        for _, summary in read_summaries(self._engine, info, self.summaries):
            elsewhere = self._relocated.intersection(summary.packs)
            packs |= set(summary.packs) - elsewhere
            packs |= {pack for pack, _, moved in follow(self._engine, view, summary.entries(elsewhere)) if moved is None}
        return packs

    def add_snapshot(self, view: RefTable, info: SnapshotRow) -> None:
        """Adds what one snapshot needs, whether or not it is held.

        Raises:
            DamageError: its record, a part or a relocation map cannot be read.
        """
        self._set_relocations(view)
        self._add_snapshot(view, info)

    def objects(self) -> set[ObjectKey]:
        """All that is needed."""
        return {*self._objects, *(ObjectKey("pack", pack) for pack in self._marks.packs)}

    def _set_relocations(self, view: RefTable, doubted: frozenset[Ulid] = frozenset()) -> None:
        relocations = frozenset(view.all_relocations())
        if self._relocations != (relocations, doubted):
            self._relocations, self._relocated = (relocations, doubted), frozenset(pack for pack, _ in relocations)
            self._snapshots, self._objects, self._marks = set(), set(), LiveBits()

    def _add(self, view: RefTable, ulid: Ulid) -> None:
        info = view.snapshot(ulid)
        try:
            if info is not None:
                self._add_snapshot(view, info)
        except DamageError as exc:
            if info is not None and self._add_twin(view, info):
                return
            labels = roots(view).get(ulid, [])
            assert info is not None
            raise UnreadableError(
                f"cannot tell what snapshot {info.root.hex()[:16]} ({', '.join(labels)}) needs, so nothing may be freed: {exc}. "
                f"`tsck fsck` says how to repair it; or {how_to_release(view, info)}",
                object_id=exc.object_id,
            ) from exc

    def _add_twin(self, view: RefTable, info: SnapshotRow) -> bool:
        """Adds a readable snapshot with the same root, so the same content; whether there is one."""
        for ulid in view.with_root(info.root):
            twin = view.snapshot(ulid)
            with suppress(MissingObjectError, CorruptObjectError, SnapshotExpiredError):
                if twin is not None and ulid != info.ulid:
                    self._add_snapshot(view, twin)
                    with self._lock:
                        self._objects.add(ObjectKey("snapshot", info.ulid))
                        self._snapshots.add(info.ulid)
                    return True
        return False

    def _add_snapshot(self, view: RefTable, info: SnapshotRow) -> None:
        objects = {ObjectKey("snapshot", info.ulid)}
        for ulid, summary in read_summaries(self._engine, info, self.summaries):
            objects.add(ObjectKey("part", ulid))
            objects |= self._add_part(view, summary)
        with self._lock:
            self._objects |= objects
            self._snapshots.add(info.ulid)

    def _add_part(self, view: RefTable, summary: PartSummary) -> set[ObjectKey]:
        """Marks what a part needs; returns the relocation maps that lead there."""
        elsewhere = self._relocated.intersection(summary.packs)
        followed = list(follow(self._engine, view, summary.entries(elsewhere), self._relocations[1]))
        located = [(pack, entries) for pack, entries, moved in followed if moved is None]
        with self._lock:
            self._marks.mark(summary.without(elsewhere) if elsewhere else summary)
            for pack, entries in located:
                self._marks.mark_entries(pack, entries)
        return {ObjectKey("moved", moved) for _, _, moved in followed if moved is not None}

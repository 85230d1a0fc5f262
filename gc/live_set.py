"""What the roots need, as of one entry of the log: a mark for each entry of each pack, and the small objects by name.

Kept up to date rather than made anew: as long as no relocation begins or ends, what more roots need is added. It may then hold
more than the roots of the newest view need, which only means that something is freed by the next run.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.threads import cpu_threads, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import Entries, follow
from tensorstore_ck.errors import DamageError, UnreadableError
from tensorstore_ck.gc.mark import LiveBits, read_summaries
from tensorstore_ck.gc.part_summary import PartSummary, SummaryCache
from tensorstore_ck.gc.roots import how_to_let_go, roots
from tensorstore_ck.log import ObjectKey, RefTable, SnapshotInfo

REMOTE_THREADS: Final = 8
TRIES: Final = 3

T = TypeVar("T")


def at_newest(engine: Engine, look: Callable[[int, RefTable], T]) -> T:
    """What `look` finds, given the newest entry's number and view; where others free what it looks at, it looks again."""
    for attempt in range(TRIES):
        anchor = engine.log.sync().n  # before any row is read: all that is seen is of this entry or later
        try:
            return look(anchor, engine.log.view())
        except DamageError:
            if attempt + 1 == TRIES or engine.log.sync().n == anchor:
                raise
    raise AssertionError


class RootNeeds:
    """What some roots need."""

    def __init__(self, marks: LiveBits, objects: set[ObjectKey]) -> None:
        self._marks = marks
        self._objects = objects
        """Records, parts and moved objects."""

    def needs(self, key: ObjectKey) -> bool:
        """Whether a root needs an object."""
        return key.ulid in self._marks.packs if key.kind == "pack" else key in self._objects

    def live_entries(self, pack: Ulid) -> Entries:
        """The entries of a pack that are needed, in order."""
        return self._marks.live_entries(pack)


class LiveSet(RootNeeds):
    """The closure of all roots."""

    def __init__(
        self, engine: Engine, part_sizes: Mapping[Ulid, int], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> None:
        """`part_sizes`: the parts that a listing showed, with their bytes; of others no summary is trusted."""
        self._engine = engine
        self._progress = progress
        self._lock = threading.Lock()
        self._summaries = SummaryCache(engine.table, part_sizes)
        self._relocations: frozenset[tuple[Ulid, Ulid]] = frozenset()
        self._relocated: frozenset[Ulid] = frozenset()
        self._snapshots: set[Ulid] = set()
        super().__init__(LiveBits(), set())

    def now(self) -> RootNeeds:
        """What the roots need that were taken in until now, whatever is taken in later. It costs a bit of memory per stored block."""
        return RootNeeds(self._marks.copy(), set(self._objects))

    def update(self, view: RefTable) -> None:
        """Takes in whatever the roots of `view` need.

        Raises:
            UnreadableError: something that a root needs cannot be read, so that nobody knows what else is needed.
        """
        relocations = frozenset(view.all_relocations())
        if relocations != self._relocations:
            self._relocations, self._relocated = relocations, frozenset(pack for pack, _ in relocations)
            self._snapshots, self._objects, self._marks = set(), set(), LiveBits()
        new = sorted(roots(view).keys() - self._snapshots)  # oldest first: packs then grow in place
        done = 0

        def add(ulid: Ulid) -> None:
            nonlocal done
            self._add(view, ulid)
            with self._lock:
                done += 1
                self._progress(done, len(new))

        for_each(new, add, cpu_threads() if self._engine.backend.is_local else REMOTE_THREADS)
        self._summaries.flush()

    def packs_of(self, view: RefTable, info: SnapshotInfo) -> set[Ulid]:
        """The packs where the blocks of a snapshot are now; its parts are read only if their summaries are not at hand.

        Raises:
            DamageError: its record, a part or a moved object cannot be read.
        """
        found: set[Ulid] = set()
        for _, summary in read_summaries(self._engine, info, self._summaries):
            elsewhere = self._relocated.intersection(summary.packs)
            found |= set(summary.packs) - elsewhere
            found |= {pack for pack, _, moved in follow(self._engine, view, summary.entries(elsewhere)) if moved is None}
        return found

    def forget_lost_summaries(self) -> None:
        """Drops from the host's cache what it knows of parts that are gone."""
        self._summaries.prune()

    def _add(self, view: RefTable, ulid: Ulid) -> None:
        info = view.snapshot(ulid)
        try:
            if info is not None:
                self._add_snapshot(view, info)
        except DamageError as exc:
            if not view.is_live(ulid):
                return  # let go meanwhile
            labels = roots(view).get(ulid, [])
            assert info is not None
            raise UnreadableError(
                f"cannot tell what snapshot {info.root.hex()[:16]} ({', '.join(labels)}) needs, so nothing may be freed: {exc}. "
                f"`tsck fsck` says how to repair it; or let it go with {how_to_let_go(view, info)}",
                object_id=exc.object_id,
            ) from exc

    def _add_snapshot(self, view: RefTable, info: SnapshotInfo) -> None:
        objects = {ObjectKey("snapshot", info.ulid)}
        for ulid, summary in read_summaries(self._engine, info, self._summaries):
            objects.add(ObjectKey("part", ulid))
            objects |= self._add_part(view, summary)
        with self._lock:
            self._objects |= objects
            self._snapshots.add(info.ulid)

    def _add_part(self, view: RefTable, summary: PartSummary) -> set[ObjectKey]:
        """Marks what a part needs; returns the moved objects on the way."""
        moved_objects: set[ObjectKey] = set()
        elsewhere = self._relocated.intersection(summary.packs)
        found = list(follow(self._engine, view, summary.entries(elsewhere)))
        with self._lock:
            self._marks.mark(summary.without(elsewhere) if elsewhere else summary)
            for pack, entries, moved in found:
                if moved is not None:
                    moved_objects.add(ObjectKey("moved", moved))
                else:
                    self._marks.mark_entries(pack, entries)
        return moved_objects

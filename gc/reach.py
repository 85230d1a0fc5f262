"""What the roots need, as of one entry of the log: a mark for each entry of each pack, and the small objects by name.

Kept up to date rather than made anew: as long as no relocation begins or ends, what more roots need is added. It may then hold
more than the roots of the newest view need, which only means that something is freed by the next run.
"""

import threading
from collections.abc import Callable

import numpy as np

from tensorstore_ck.closure import Entries, follow
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import DamageError, UnreadableError
from tensorstore_ck.gc.mark import read_parts
from tensorstore_ck.gc.roots import roots
from tensorstore_ck.ids import Ulid
from tensorstore_ck.log import ObjectKey, RefTable, SnapshotInfo
from tensorstore_ck.parallel import for_each
from tensorstore_ck.part import Part

REMOTE_THREADS = 8


class Reach:
    """The closure of all roots."""

    def __init__(self, engine: Engine, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        self._engine = engine
        self._progress = progress
        self._lock = threading.Lock()
        self._relocations: frozenset[tuple[Ulid, Ulid]] | None = None
        self._snapshots: set[Ulid] = set()
        self.packs: dict[Ulid, Entries] = {}
        """Pack -> a byte for each entry up to the last that is needed."""
        self.objects: set[ObjectKey] = set()
        """Records, parts and moved objects."""

    def update(self, view: RefTable) -> None:
        """Takes in whatever the roots of `view` need.

        Raises:
            UnreadableError: something that a root needs cannot be read, so that nobody knows what else is needed.
        """
        relocations = frozenset(view.all_relocations())
        if relocations != self._relocations:
            self._relocations = relocations
            self._snapshots.clear()
            self.packs.clear()
            self.objects.clear()
        new = [ulid for ulid in roots(view) if ulid not in self._snapshots]
        done = 0

        def add(ulid: Ulid) -> None:
            nonlocal done
            self._add(view, ulid)
            with self._lock:
                done += 1
                self._progress(done, len(new))

        for_each(new, add, 1 if self._engine.backend.is_local else REMOTE_THREADS)

    def needs(self, key: ObjectKey) -> bool:
        """Whether a root needs an object."""
        return key.ulid in self.packs if key.kind == "pack" else key in self.objects

    def live_entries(self, pack: Ulid) -> Entries:
        """The entries of a pack that are needed, in order."""
        return np.flatnonzero(self.packs.get(pack, np.empty(0, np.uint8)))

    def _add(self, view: RefTable, ulid: Ulid) -> None:
        info = view.snapshot(ulid)
        try:
            if info is not None:
                self._add_snapshot(view, info)
        except DamageError as exc:
            if not view.is_live(ulid):
                return  # let go meanwhile
            refs = ", ".join(roots(view).get(ulid, ()))
            raise UnreadableError(
                f"cannot tell what snapshot {info.root.hex()[:16] if info else ''} ({refs}) needs, so nothing may be freed: {exc}. "
                "Mend it with `tsck fsck --repair`, or let it go with `tsck forget`",
                object_id=exc.object_id,
            ) from exc

    def _add_snapshot(self, view: RefTable, info: SnapshotInfo) -> None:
        objects = {ObjectKey("snapshot", info.ulid)}
        for ulid, part, _ in read_parts(self._engine, info):
            objects.add(ObjectKey("part", ulid))
            self._add_part(view, part, objects)
        with self._lock:
            self.objects |= objects
            self._snapshots.add(info.ulid)

    def _add_part(self, view: RefTable, part: Part, objects: set[ObjectKey]) -> None:
        numbers = part.extents["pack"]
        for number in np.flatnonzero(np.bincount(numbers)).tolist() if len(numbers) else ():
            entries = np.unique(part.extents["entry"][numbers == number])
            for pack, found, moved in follow(self._engine, view, part.packs[number], entries):
                if moved is not None:
                    objects.add(ObjectKey("moved", moved))
                else:
                    self._mark(pack, found)

    def _mark(self, pack: Ulid, entries: Entries) -> None:
        with self._lock:
            marks = self.packs.get(pack)
            size = int(entries[-1]) + 1
            if marks is None or len(marks) < size:
                grown = np.zeros(size, np.uint8)
                grown[: 0 if marks is None else len(marks)] = [] if marks is None else marks
                marks = self.packs[pack] = grown
            marks[entries] = 1

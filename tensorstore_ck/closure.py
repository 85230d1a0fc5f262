"""What a snapshot needs at one entry of the log: record, parts, moved objects on the way, and the packs where its blocks are now.

Readers, writers, marking and checks all find the places of blocks here, so that they cannot disagree. Relocations change
where a block is, never what it is; a place is good for the view that it was resolved at.
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError, SnapshotExpiredError
from tensorstore_ck.ids import Ulid
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable, SnapshotInfo
from tensorstore_ck.part import Extents, Part

Entries = npt.NDArray[Any]

_MAX_HOPS: Final = 500
"""How often a block may have been moved: gc moves one a few times in its life."""


class Places(NamedTuple):
    """Where the blocks of a part are."""

    packs: list[Ulid]
    """The part's pack table, and after it the targets of relocations."""
    extents: Extents
    """As the part's, with ``pack`` counting in `packs`."""
    moved: frozenset[Ulid]
    """The moved objects that led there."""

    def objects(self) -> Iterator[ObjectKey]:
        """The packs in use, and the moved objects."""
        numbers = self.extents["pack"]
        for number in np.flatnonzero(np.bincount(numbers)).tolist() if len(numbers) else ():
            yield ObjectKey("pack", self.packs[number])
        for moved in self.moved:
            yield ObjectKey("moved", moved)


def resolve(engine: Engine, view: RefTable, part: Part) -> Places:
    """The places of a part's blocks.

    Raises:
        DamageError: a moved object cannot be read, or relocations lead in a circle.
    """
    packs, extents, moved = list(part.packs), part.extents, set[Ulid]()
    numbers = [(number, 0) for number in range(len(packs))]
    while numbers:
        number, hops = numbers.pop()
        _require_end(packs[number], hops)
        relocations = view.relocations(packs[number])
        rows = np.flatnonzero(extents["pack"] == number) if relocations else np.empty(0, np.int64)
        for relocation in relocations:
            found = engine.read_moved(relocation)
            at = np.searchsorted(found.rows["from"], extents["entry"][rows])
            hit = found.rows["from"][np.minimum(at, len(found.rows) - 1)] == extents["entry"][rows]
            if not hit.any():
                continue
            if extents is part.extents:
                extents = extents.copy()
            moved.add(relocation.moved)
            first, to = len(packs), found.rows[at[hit]]
            packs += found.targets
            numbers += [(new, hops + 1) for new in range(first, len(packs))]
            for field in ("entry", "stored", "offset", "codec"):
                extents[field][rows[hit]] = to[field]
            extents["pack"][rows[hit]] = to["target"] + first
            rows = rows[~hit]
    return Places(packs, extents, frozenset(moved))


def _require_end(pack: Ulid, hops: int) -> None:
    """Refuses relocations that lead back to where they began: nobody writes those, as a pack's name is never used again."""
    if hops > _MAX_HOPS:
        name = ObjectKey("pack", pack).name
        raise CorruptObjectError(f"the relocations of {name} lead in a circle: check the store with `tsck fsck`", object_id=name)


def follow(engine: Engine, view: RefTable, pack: Ulid, entries: Entries, hops: int = 0) -> Iterator[tuple[Ulid, Entries, Ulid | None]]:
    """(pack, entries, moved object on the way) for each place where sorted `entries` of `pack` are now, step by step.

    What a moved object leads to is followed on; it is yielded with no entries. `hops`: how often the entries were moved before.

    Raises:
        CorruptObjectError: the relocations lead in a circle.
    """
    _require_end(pack, hops)
    for relocation in view.relocations(pack):
        found = engine.read_moved(relocation)
        at = np.minimum(np.searchsorted(found.rows["from"], entries), len(found.rows) - 1)
        hit = found.rows["from"][at] == entries
        if hit.any():
            yield pack, entries[:0], relocation.moved
            to = found.rows[at[hit]]
            for number in np.unique(to["target"]).tolist():
                yield from follow(engine, view, found.targets[number], np.sort(to["entry"][to["target"] == number]), hops + 1)
            entries = entries[~hit]
    if len(entries):
        yield pack, entries, None


def snapshot_closure(engine: Engine, view: RefTable, info: SnapshotInfo) -> Objects:
    """Everything that reading a snapshot needs.

    Raises:
        DamageError: its record, a part or a moved object cannot be read.
    """
    record = engine.read_record(info)
    needed: list[ObjectKey] = []
    for rank in range(len(record.parts)):
        needed += resolve(engine, view, engine.read_part(record, rank)).objects()
    return Objects([ObjectKey("snapshot", info.ulid), *(ObjectKey("part", part) for part in record.parts), *needed])


def condemned_among(view: RefTable, needed: Iterable[ObjectKey], anchor: int, what: str) -> Objects:
    """What must be rescued in the entry that makes something reachable.

    Args:
        view: The fold at the head that the entry follows.
        needed: The closure at that head.
        anchor: The entry under which it was known that all of it is there.
        what: For the message.

    Raises:
        SnapshotExpiredError: some of it was swept, or so much was settled since `anchor` that nobody knows.
    """
    if anchor < view.horizon():
        raise SnapshotExpiredError(
            f"{what} relies on what was there at log entry {anchor}, before the horizon {view.horizon()}: it may be gone"
        )
    states = {key: view.object_state(key) for key in needed}
    for key, state in states.items():
        if state is not None and state.swept:
            raise SnapshotExpiredError(f"{what} needs {key.name}, which gc freed", object_id=key.name)
    return Objects(key for key, state in states.items() if state is not None)


def rescue(view: RefTable, needed: Iterable[ObjectKey], anchor: int, what: str) -> list[Op]:
    """The operation that rescues what `condemned_among` finds, if it finds anything."""
    condemned = condemned_among(view, needed, anchor, what)
    return [Op.rescue(condemned)] if condemned else []


def revive(engine: Engine, view: RefTable, info: SnapshotInfo) -> list[Op]:
    """What must be in the entry that holds a snapshot; nothing while it is held anyhow.

    Raises:
        SnapshotExpiredError: gc freed some of it.
    """
    expired_at = view.expired_at(info.ulid)
    if expired_at is None:
        return []
    what = f"snapshot {info.root.hex()[:16]} (step {info.step})"
    try:
        return rescue(view, snapshot_closure(engine, view, info), expired_at, what)
    except MissingObjectError as exc:
        raise SnapshotExpiredError(f"{what} was forgotten, and gc freed {exc.object_id}", object_id=info.root.hex()) from exc


def require_live(engine: Engine, info: SnapshotInfo, trouble: Exception) -> RefTable:
    """The newest view, if the snapshot is still held: then what is missing was moved, or is damaged.

    Raises:
        SnapshotExpiredError: nothing holds the snapshot any more.
    """
    engine.log.sync()
    view = engine.log.view()
    if view.staged(info.ulid) is not None:
        if not isinstance(trouble, MissingObjectError):
            return view
        raise MissingObjectError(
            f"snapshot {info.root.hex()[:16]} (step {info.step}) is staged, and something of it is not on this host: {trouble}. Restore on "
            "the hosts that staged it, or wait until it is published",
            object_id=info.root.hex(),
        ) from trouble
    if not view.is_live(info.ulid):
        raise SnapshotExpiredError(
            f"snapshot {info.root.hex()[:16]} (step {info.step}) was forgotten, "
            "and gc freed some of it while it was read: take another one",
            object_id=info.root.hex(),
        ) from trouble
    return view

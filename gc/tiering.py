"""Does what policies wish of snapshots as they age: encodes their packs smaller, and moves them to colder places, or back.

A pack is needed by many snapshots, and goes only where the youngest of them lets it (retention/ageing.py). To move it is to rewrite it:
the copies have new names, the log says where they lie and puts them in force in one entry, and gc frees what was replaced. So a move is as
safe as a compaction, beside writers, readers and other hosts that do the same; and no pack is ever at two places.
"""

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tensorstore_ck.backend.cold.locations import store_location
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import UnsafeBackendError
from tensorstore_ck.format.codec import Mode
from tensorstore_ck.gc.compact import SparsePack, live_bytes
from tensorstore_ck.gc.listing import ListedObject, list_objects
from tensorstore_ck.gc.live_set import LiveSet, at_newest
from tensorstore_ck.gc.repack import RepackScan, look_at, rewrite, smaller
from tensorstore_ck.gc.report import Progress, ProgressSum, ignore_progress
from tensorstore_ck.log import ObjectKey, RefTable
from tensorstore_ck.log.cache import Table, TableError
from tensorstore_ck.log.retention.age_rules import OWN_LOCATION, UNCHANGED, AgeTarget, age_targets

MODE: Final[Mode] = "small"
_JUDGED: Final = b"j/"


@dataclass(frozen=True, slots=True)
class TieredPack:
    """A pack that was rewritten."""

    name: str
    live_bytes: int
    place: str | None
    """The URL where its blocks lie now; None: the store's own place."""
    is_moved: bool
    """Else it was only encoded anew."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """What was done; in a dry run, what would be."""

    dry_run: bool
    snapshots: int
    """Those that were looked at; none where no policy says anything of ageing."""
    packs: tuple[TieredPack, ...]
    written_bytes: int
    """In a dry run, judged by some blocks of each pack that is encoded anew; those that are moved count as they are."""
    notes: tuple[str, ...]
    """Packs that could not be read, and why."""

    @property
    def before_bytes(self) -> int:
        """What the blocks took that were rewritten."""
        return sum(pack.live_bytes for pack in self.packs)


class _TierPlan(NamedTuple):
    snapshots: int
    targets: dict[ObjectKey, tuple[str | None, bool]]
    """Pack -> where it is to lie, and whether it is to be encoded smaller; of those of which anything is wished."""


def run_tiering(engine: Engine, *, dry_run: bool = False, take_places: bool = False, progress: Progress | None = None) -> TierReport:
    """Brings packs to where the policies want them, encoded as they want them.

    With `take_places` it says first that packs at other places belong to the store here, and not to one of which it is a copy.

    Raises:
        GcRefusedError: they belong to another one.
        PlaceUnavailableError: a place cannot be used.
        UnreadableError: something that is held cannot be read, so that nobody knows which blocks of a pack are needed.
        UnsafeBackendError: the backend does not keep what the safety of relocations rests on.
        InvalidOptionError: a newer build made one of the policies.
    """
    progress = progress or ignore_progress
    if not dry_run:
        engine.require_writable()
    url = engine.backend.url
    if not engine.config.exclusive_create:
        raise UnsafeBackendError(f"{url} does not create objects exclusively: tier needs a total order of commits", object_id=url)
    if dry_run:
        engine.log.sync()
    else:
        engine.log.verify()
    if take_places and not dry_run:
        engine.placed.claim_all()
    if not dry_run:
        engine.placed.require_owner()
    listed = list_objects(engine.backend)
    part_sizes = {key.ulid: found.size_bytes for key, found in listed.items() if key.kind == "part"}
    reach = LiveSet(engine, part_sizes, lambda done, total: progress("marking snapshots", done, total))
    plan = at_newest(engine, lambda _, view: _plan(engine, reach, listed, view))
    places = engine.placed.locations()
    moving = {key for key, (place, _) in plan.targets.items() if place != places.get(key.ulid)}
    judged = _judged(engine.table)
    staying = {key for key in plan.targets.keys() - moving if key.ulid not in judged}
    found = look_at(engine, reach, {key: listed[key] for key in moving | staying}, progress)
    to_move = [pack for pack in found.packs if ObjectKey("pack", pack.pack) in moving]
    to_judge = RepackScan([pack for pack in found.packs if ObjectKey("pack", pack.pack) in staying], found.notes)
    worth = smaller(engine, to_judge, MODE, progress)
    told: list[TieredPack] = []
    written, notes = worth.after_bytes + sum(map(live_bytes, to_move)), found.notes
    if not dry_run:
        written = 0
        worth_it = {pack.pack for pack in worth.packs}
        _note_judged(engine.table, {pack.pack for pack in to_judge.packs} - worth_it, gone=judged - {key.ulid for key in listed})
    copied = ProgressSum(progress, "rewriting packs", sum(map(live_bytes, [*to_move, *worth.packs])))
    for (place, small), packs in _grouped(plan, [*to_move, *worth.packs]):
        done = packs
        if not dry_run:
            rewritten = rewrite(engine, reach, packs, mode=MODE if small else None, place=place, progress=copied.add)
            done, written, notes = rewritten.packs, written + rewritten.written_bytes, [*notes, *rewritten.notes]
        told += [_told(pack, place, is_moved=ObjectKey("pack", pack.pack) in moving) for pack in done]
    return TierReport(dry_run, plan.snapshots, tuple(told), written, tuple(notes))


def _plan(engine: Engine, reach: LiveSet, listed: dict[ObjectKey, ListedObject], view: RefTable) -> _TierPlan:
    wished = age_targets(view, engine.clock())
    if not wished:
        return _TierPlan(0, {})
    reach.update(view)
    of_pack: dict[Ulid, AgeTarget] = {}
    for ulid, wish in wished.items():
        info = view.snapshot(ulid)
        for pack in reach.packs_of(view, info) if info is not None else ():
            of_pack[pack] = wish.with_other(of_pack[pack]) if pack in of_pack else wish
    places = view.locations()
    targets = {}
    for pack, wish in of_pack.items():
        key, now = ObjectKey("pack", pack), places.get(pack)
        place = (
            now if wish.stage == UNCHANGED else None if wish.stage == OWN_LOCATION else store_location(wish.stage.url, engine.config.uuid)
        )
        if (place != now or wish.small) and key in listed and view.object_state(key) is None:
            targets[key] = (place, wish.small)
    return _TierPlan(len(wished), targets)


def _grouped(plan: _TierPlan, packs: list[SparsePack]) -> Iterator[tuple[tuple[str | None, bool], list[SparsePack]]]:
    """Those together that go to one place in one form."""
    groups: dict[tuple[str | None, bool], list[SparsePack]] = {}
    for pack in packs:
        groups.setdefault(plan.targets[ObjectKey("pack", pack.pack)], []).append(pack)
    yield from groups.items()


def _told(pack: SparsePack, place: str | None, *, is_moved: bool) -> TieredPack:
    return TieredPack(ObjectKey("pack", pack.pack).name, live_bytes(pack), place, is_moved)


def _judged(table: Table) -> set[Ulid]:
    """The packs that this host found not worth encoding anew, so that each is read for that once. A cache."""
    return {Ulid(key[len(_JUDGED) :]) for key, _ in table.scan(_JUDGED)}


def _note_judged(table: Table, packs: Collection[Ulid], *, gone: Collection[Ulid]) -> None:
    with contextlib.suppress(TableError), table.batch() as batch:
        for pack in packs:
            batch.put(_JUDGED + pack, b"")
        for pack in gone:
            batch.delete(_JUDGED + pack)

"""Applies age rules of policies: encodes the packs of old snapshots smaller, and moves them to cold locations, or back.

A pack moves only when every snapshot that uses it is old enough (log/retention/age_rules.py). A move rewrites the pack: the copies have
new names, one log entry names their location and relocates the pack, and gc frees the old one. So a move is as safe as a compaction,
alongside writers, readers and other hosts that do the same; and no pack is ever at two locations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple

from tensorstore_ck.backend.cold.locations import store_location
from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.common.units import human_bytes
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.freed_meanwhile import at_newest
from tensorstore_ck.format.codec import Mode
from tensorstore_ck.gc.listing import ListedObject, list_objects, part_sizes
from tensorstore_ck.gc.mark_reachable import LiveSet, require_total_order
from tensorstore_ck.gc.recode_or_move import PlannedPack, plan_repack, repack_packs
from tensorstore_ck.gc.report import Progress, ProgressSum, ignore_progress
from tensorstore_ck.log import ObjectKey, RefTable
from tensorstore_ck.log.cache import write_rows
from tensorstore_ck.log.retention.age_rules import OWN_LOCATION, UNCHANGED, AgeTarget, age_targets

MODE: Final[Mode] = "small"
_INCOMPRESSIBLE: Final = b"j/"


@dataclass(frozen=True, slots=True)
class TieredPack:
    """A rewritten pack."""

    name: str
    live_bytes: int
    place: str | None
    """URL of its blocks now; None: the store's own location."""
    is_moved: bool
    """False: only re-encoded."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """The result of moving and re-encoding packs; in a dry run, the result that it would have."""

    dry_run: bool
    snapshots: int
    """Snapshots that were looked at; 0 if no policy has age rules."""
    packs: tuple[TieredPack, ...]
    written_bytes: int
    """In a dry run, estimated from some blocks of each re-encoded pack; moved packs count with their present size."""
    notes: tuple[str, ...]
    """Why packs could not be read."""

    def __repr__(self) -> str:
        sizes = f"{human_bytes(self.before_bytes)} -> {human_bytes(self.written_bytes)}"
        return f"TierReport({'dry run, ' if self.dry_run else ''}{self.snapshots:,} snapshots, {len(self.packs):,} packs, {sizes})"

    @property
    def before_bytes(self) -> int:
        """Stored bytes of the rewritten blocks, before."""
        return sum(pack.live_bytes for pack in self.packs)


class _TierPlan(NamedTuple):
    snapshots: int
    targets: dict[ObjectKey, tuple[str | None, bool]]
    """Pack to rewrite -> (target location, whether to encode it smaller)."""


def run_tiering(engine: Engine, *, dry_run: bool = False, claim_locations: bool = False, progress: Progress | None = None) -> TierReport:
    """Moves and re-encodes packs as the policies ask.

    `claim_locations` first claims packs at other locations for this store, in case it is a copy of the store that moved them.

    Raises:
        GcRefusedError: the packs at other locations belong to another store.
        PlaceUnavailableError: a location cannot be used.
        UnreadableError: a held snapshot cannot be read, so which blocks of a pack are needed is unknown.
        UnsafeBackendError: the backend does not create objects exclusively.
        InvalidOptionError: a newer build made one of the policies.
    """
    progress = progress or ignore_progress
    if not dry_run:
        engine.require_writable()
    require_total_order(engine, "tier")
    if dry_run:
        engine.log.sync()
    else:
        engine.log.verify()
    if claim_locations and not dry_run:
        engine.placed.claim_all()
    if not dry_run:
        engine.placed.require_owner()
    listed = list_objects(engine.backend)
    live = LiveSet(engine, part_sizes(listed), lambda done, total: progress("marking snapshots", done, total))
    plan = at_newest(engine.log, lambda _, view: _plan(engine, live, listed, view))
    locations = engine.placed.locations()
    moving = {key for key, (url, _) in plan.targets.items() if url != locations.get(key.ulid)}
    # packs that would not get smaller by re-encoding: this host's cache, so that each is tried once
    judged = {Ulid(key[len(_INCOMPRESSIBLE) :]) for key, _ in engine.table.scan(_INCOMPRESSIBLE)}
    staying = {key for key in plan.targets.keys() - moving if key.ulid not in judged}
    to_move = plan_repack(engine, live, {key: listed[key] for key in moving}, mode=None, progress=progress)
    worth = plan_repack(engine, live, {key: listed[key] for key in staying}, mode=MODE, progress=progress)
    moved: list[TieredPack] = []
    written, notes = to_move.after_bytes + worth.after_bytes, [*to_move.notes, *worth.notes]
    if not dry_run:
        written = 0
        noted, gone = {_INCOMPRESSIBLE + pack: b"" for pack in worth.kept}, judged - {key.ulid for key in listed}
        write_rows(engine.table, {**noted, **{_INCOMPRESSIBLE + pack: None for pack in gone}})
    copied = ProgressSum(progress, "rewriting packs", sum(pack.live_bytes for pack in [*to_move.packs, *worth.packs]))
    for (url, small), packs in _grouped(plan, [*to_move.packs, *worth.packs]):
        done = packs
        if not dry_run:
            rewritten = repack_packs(engine, live, packs, mode=MODE if small else None, url=url, progress=copied.add)
            done, written, notes = rewritten.packs, written + rewritten.written_bytes, [*notes, *rewritten.notes]
        keys = [(pack, ObjectKey("pack", pack.pack)) for pack in done]
        moved += [TieredPack(key.name, pack.live_bytes, url, key in moving) for pack, key in keys]
    return TierReport(dry_run=dry_run, snapshots=plan.snapshots, packs=tuple(moved), written_bytes=written, notes=tuple(notes))


def _plan(engine: Engine, live: LiveSet, listed: dict[ObjectKey, ListedObject], view: RefTable) -> _TierPlan:
    wanted = age_targets(view, engine.clock())
    if not wanted:
        return _TierPlan(0, {})
    live.update(view)
    of_pack: dict[Ulid, AgeTarget] = {}
    for ulid, target in wanted.items():
        info = view.snapshot(ulid)
        for pack in live.packs_of(view, info) if info is not None else ():
            of_pack[pack] = target.with_other(of_pack[pack]) if pack in of_pack else target
    locations = view.locations()
    targets = {}
    for pack, target in of_pack.items():
        key, now = ObjectKey("pack", pack), locations.get(pack)
        url = (
            now
            if target.stage == UNCHANGED
            else None
            if target.stage == OWN_LOCATION
            else store_location(target.stage.url, engine.config.uuid)
        )
        if (url != now or target.small) and key in listed and view.object_state(key) is None:
            targets[key] = (url, target.small)
    return _TierPlan(len(wanted), targets)


def _grouped(plan: _TierPlan, packs: list[PlannedPack]) -> Iterator[tuple[tuple[str | None, bool], list[PlannedPack]]]:
    """Groups packs by target location and encoding."""
    groups: dict[tuple[str | None, bool], list[PlannedPack]] = {}
    for pack in packs:
        groups.setdefault(plan.targets[ObjectKey("pack", pack.pack)], []).append(pack)
    yield from groups.items()

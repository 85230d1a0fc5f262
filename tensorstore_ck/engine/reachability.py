"""What a snapshot needs at one log entry: its record, parts, relocation maps, and the packs that hold its blocks now.

Readers, writers, gc and fsck all locate blocks here, so they cannot disagree. A relocation changes where a block is, never its content;
a location is valid for the view at which it was found. A part's extents are the locations of its blocks, followed by those of their delta
bases, and of the bases' bases.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError, SnapshotExpiredError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, Codec, base_count
from tensorstore_ck.format.pack import MAX_BASES, pack_name
from tensorstore_ck.format.part import EXTENT_DTYPE, Extents, Part
from tensorstore_ck.format.relocation import RelocationMap, Rows
from tensorstore_ck.log import ObjectKey, Objects, Op, RefTable, Relocation, SnapshotRow
from tensorstore_ck.log.block_index import Base, Location
from tensorstore_ck.log.table_rows import RELOCATIONS

MAX_DEPTH: Final = 200
"""The longest chain of bases."""
SEVERAL_LEVELS: Final = 2
"""Only a block that is not a base may have several bases, and each of these: builds of 2026 stored casts of casts of equal bytes."""

_WITH_BASES: Final = [int(codec) for codec in CODECS_WITH_BASES]


class PartExtents(NamedTuple):
    """The physical section of a part."""

    packs: list[Ulid]
    rows: Extents
    base_ids: bytes


def extents_of(ids: Sequence[Digest], places: Mapping[Digest, Location]) -> PartExtents:
    """The extents of blocks at `places`, which also has the locations of bases that carry no location.

    The bases of a row are consecutive rows after it and after all blocks, so chains end.
    """
    numbers: dict[Ulid, int] = {}
    wanted, base_ids = [*map(places.__getitem__, ids)], list[Digest]()
    shared: dict[tuple[Digest, ...], int] = {}
    rows: list[tuple[int, ...]] = []
    for place in wanted:  # which grows in the loop
        first_base = -1
        if place.bases:
            is_block, key = len(rows) < len(ids), tuple([base.block for base in place.bases])
            first_base = shared.get(key, -1) if is_block else -1
            if first_base < 0:
                first_base = len(wanted)
                wanted += [base.location if base.location is not None else places[base.block] for base in place.bases]
                base_ids += key
                if is_block:
                    shared[key] = first_base
        number = numbers.setdefault(place.pack, len(numbers))
        rows.append((number, place.entry, place.offset, place.stored, place.raw, first_base, place.codec, place.flags))
    extents = np.empty(len(rows), EXTENT_DTYPE)
    for field, column in zip(EXTENT_DTYPE.names or (), zip(*rows, strict=True), strict=False):  # three times as fast as row by row
        extents[field] = column
    return PartExtents(list(numbers), extents, b"".join(base_ids))


def with_bases(place: Location, places: Mapping[Digest, Location]) -> Location:
    """The same location with the locations of all its bases, so that another part can use it."""
    bases = tuple(base if base.location is not None else Base(base.block, with_bases(places[base.block], places)) for base in place.bases)
    return place._replace(bases=bases)


def location_of(part: Part, packs: Sequence[Ulid], extents: Extents, row: int, depth: int = 0) -> Location:
    """The location of the block in a row of located `extents`, with its chain of bases.

    Raises:
        CorruptObjectError: its bases are not valid rows, or too many.
    """
    chain = list[tuple[int, ...]]()
    while True:  # not by recursion: chains of differences are long
        fields: Any = extents.item(row)
        _, _, _, _, _, first, codec, flags = fields
        count, level = base_count(codec, flags), depth + len(chain)
        fits = row < first <= len(extents) - count and level < MAX_DEPTH
        if codec in _WITH_BASES and not (count and fits and count <= (MAX_BASES if level < SEVERAL_LEVELS else 1)):
            pack = packs[fields[0]]
            raise CorruptObjectError(f"{pack_name(pack)}: a part names a block there with invalid delta bases", object_id=pack_name(pack))
        chain.append(fields)
        if count != 1:
            break
        row = first
    several = range(first, first + count)
    bases = tuple([Base(part.block_id(base), location_of(part, packs, extents, base, depth + len(chain))) for base in several])
    while True:  # the last link first, as each has the next one
        number, entry, offset, stored, raw, _, codec, flags = chain.pop()
        found = Location(packs[number], entry, offset, stored, raw, codec, bases, flags if bases else 0)
        if not chain:
            return found
        bases = (Base(part.block_id(chain[-1][5]), found),)


def require_bases(part: Part, packs: Sequence[Ulid], extents: Extents) -> None:
    """Checks that every block of a part can be located with its bases. Raises `CorruptObjectError`: see `location_of`.

    Follows the chains only of a part where a base is a cast: chains of differences are checked when they are made, and may be long.
    """
    rows = np.flatnonzero(np.isin(extents["codec"], _WITH_BASES))
    for row in rows[(extents["base"][rows] <= rows) | (extents["base"][rows] >= len(extents))].tolist():
        location_of(part, packs, extents, row)
    if (extents["codec"][part.block_count :] == Codec.CAST).any():
        for row in np.flatnonzero(np.isin(extents["codec"][: part.block_count], _WITH_BASES)).tolist():
            location_of(part, packs, extents, row)


def locations_of(part: Part, packs: Sequence[Ulid], extents: Extents, rows: Sequence[int]) -> list[Location | None]:
    """The locations of the blocks in these rows: see `location_of`. None where the bases are not valid."""
    chosen = extents[list(rows)]
    of_rows, *columns = [chosen[field].tolist() for field in ("pack", "entry", "offset", "stored", "raw", "codec")]
    found: list[Location | None] = [*map(Location, map(packs.__getitem__, of_rows), *columns)]
    for position in np.flatnonzero(np.isin(chosen["codec"], _WITH_BASES)).tolist():
        try:
            found[position] = location_of(part, packs, extents, rows[position])
        except CorruptObjectError:
            found[position] = None
    return found


def chain_of(place: Location) -> Iterator[Location]:
    """A location, and the locations of all bases that are needed to decode its block."""
    pending = [place]
    while pending:
        place = pending.pop()
        yield place
        pending += [base.location for base in reversed(place.bases) if base.location is not None]


Entries = npt.NDArray[Any]
Positions = npt.NDArray[np.int64]


class BlockLocations(NamedTuple):
    """Where the blocks of a part are now."""

    packs: list[Ulid]
    """The part's packs, then the targets of relocations."""
    extents: Extents
    """The part's extents; ``pack`` is an index into `packs`."""
    moved: frozenset[Ulid]
    """The relocation maps that lead there."""

    def objects(self) -> Iterator[ObjectKey]:
        """The packs in use, and the relocation maps."""
        numbers = self.extents["pack"]
        for number in np.flatnonzero(np.bincount(numbers)).tolist() if len(numbers) else ():
            yield ObjectKey("pack", self.packs[number])
        for moved in self.moved:
            yield ObjectKey("moved", moved)


def locate_blocks(engine: Engine, view: RefTable, part: Part) -> BlockLocations:
    """Locates a part's blocks.

    Raises:
        DamageError: a relocation map cannot be read, or relocations form a cycle.
    """
    packs = list(part.packs)
    relocated = relocations_in_order(view, packs) if view.may_have(RELOCATIONS) else {}
    if not relocated:
        return BlockLocations(packs, part.extents, frozenset())
    extents, moved = part.extents.copy(), set[Ulid]()
    numbers = {pack: number for number, pack in enumerate(packs)}
    pending: dict[Ulid, list[Positions]] = {}
    for number, rows in grouped(extents["pack"]):
        pending.setdefault(packs[number], []).append(rows)
    for pack, relocations in relocated.items():
        left = _concatenate(pending.pop(pack, ()))
        for relocation in relocations:
            if not len(left):
                break
            relocation_map, targets, is_listed = _look_up(engine, relocation, extents["entry"][left])
            if not len(targets):
                continue
            moved.add(relocation.moved)
            rows = left[is_listed]
            for field in ("entry", "stored", "offset", "codec"):
                extents[field][rows] = targets[field]
            for number, at in grouped(targets["target"]):
                target = relocation_map.targets[number]
                if target not in numbers:
                    numbers[target] = len(packs)
                    packs.append(target)
                extents["pack"][rows[at]] = numbers[target]
                pending.setdefault(target, []).append(rows[at])
            left = left[~is_listed]
    return BlockLocations(packs, extents, frozenset(moved))


def follow(
    engine: Engine, view: RefTable, entries: Mapping[Ulid, Entries], doubted: Collection[Ulid] = ()
) -> Iterator[tuple[Ulid, Entries, Ulid | None]]:
    """Follows sorted `entries` of packs: yields (pack, entries, None) for where they are now, and (pack, no entries, relocation map).

    Entries that a `doubted` relocation map lists may be there, or where they would be without that map: both are yielded.

    Raises:
        DamageError: a relocation map cannot be read, or relocations form a cycle.
    """
    pending = {pack: [relocation_map] for pack, relocation_map in entries.items()}
    for pack, relocations in relocations_in_order(view, entries).items():
        left = np.unique(_concatenate(pending.pop(pack, ())))
        for relocation in relocations:
            if not len(left):
                break
            relocation_map, targets, is_listed = _look_up(engine, relocation, left)
            if not len(targets):
                continue
            yield pack, left[:0], relocation.moved
            for number, at in grouped(targets["target"]):
                pending.setdefault(relocation_map.targets[number], []).append(targets["entry"][at])
            left = left if relocation.moved in doubted else left[~is_listed]
        if len(left):
            yield pack, left, None
    for pack, rest in pending.items():
        yield pack, np.unique(_concatenate(rest)), None


def relocations_in_order(view: RefTable, packs: Collection[Ulid]) -> dict[Ulid, list[Relocation]]:
    """The relocations of `packs` and of all packs that they lead to, in topological order: each pack before its targets.

    So blocks that reach a pack by several ways are followed together, and each relocation is looked up once. Every relocation leads to
    packs that were made for it, or from a pack that never existed, so a true log has no cycles.

    Raises:
        CorruptObjectError: relocations form a cycle.
    """
    ends_first: dict[Ulid, list[Relocation]] = {}
    way: dict[Ulid, list[Relocation]] = {}
    pending = list(packs)
    while pending:
        pack = pending[-1]
        if pack in way:
            ends_first[pack] = way.pop(pack)
        if pack in ends_first:
            pending.pop()
            continue
        way[pack] = view.relocations(pack)
        for relocation in way[pack]:
            for target in relocation.targets:
                if target in way:
                    raise _circle(way, target)
                if target not in ends_first:
                    pending.append(target)
    return {pack: relocations for pack, relocations in reversed(ends_first.items()) if relocations}


def _circle(way: Mapping[Ulid, Sequence[Relocation]], back_to: Ulid) -> CorruptObjectError:
    """The error for a `way` whose last pack leads back to an earlier one. The newest relocation of the cycle must be the false one."""
    packs = [*way][[*way].index(back_to) :]
    steps = zip(packs, [*packs[1:], back_to], strict=True)
    by_age = attrgetter("n", "moved")
    circle = [max((relocation for relocation in way[pack] if to in relocation.targets), key=by_age) for pack, to in steps]
    newest = max(circle, key=by_age)
    name = ObjectKey("moved", newest.moved).name
    return CorruptObjectError(
        f"{name} leads blocks of {ObjectKey('pack', newest.pack).name} back to where they came from: {len(packs)} relocations lead in a "
        f"circle, so log entry {newest.n}, or one before it, was forged; run `tsck fsck`",
        object_id=name,
    )


def _look_up(engine: Engine, relocation: Relocation, entries: Entries) -> tuple[RelocationMap, Rows, npt.NDArray[np.bool_]]:
    """Returns the relocation map, its rows for those `entries` that it lists, and a mask of these entries."""
    relocation_map = engine.read_moved(relocation)
    at = np.minimum(np.searchsorted(relocation_map.rows["from"], entries), len(relocation_map.rows) - 1)
    is_listed = relocation_map.rows["from"][at] == entries
    return relocation_map, relocation_map.rows.take(at[is_listed]), is_listed  # `take` copies rows many times faster than an index does


def grouped(numbers: npt.NDArray[Any]) -> Iterator[tuple[int, Positions]]:
    """Yields each number that occurs, with its positions."""
    order = np.argsort(numbers, kind="stable")
    starts = np.flatnonzero(np.diff(numbers[order], prepend=-1))
    for at in np.split(order, starts[1:]) if len(order) else ():
        yield int(numbers[at[0]]), at


def _concatenate(pieces: Sequence[Positions]) -> Positions:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces) if pieces else np.empty(0, np.int64)


def snapshot_closure(engine: Engine, view: RefTable, info: SnapshotRow) -> Objects:
    """Everything that reading a snapshot needs.

    Raises:
        DamageError: its record, a part or a relocation map cannot be read.
    """
    record = engine.read_own_record(info)
    needed: list[ObjectKey] = []
    for rank in range(len(record.parts)):
        needed += locate_blocks(engine, view, engine.read_part(record, rank)).objects()
    return Objects([ObjectKey("snapshot", info.ulid), *(ObjectKey("part", part) for part in record.parts), *needed])


def condemned_among(view: RefTable, needed: Iterable[ObjectKey], anchor: int, what: str) -> Objects:
    """The objects to rescue in the entry that makes `needed`, the closure at the head of `view`, reachable.

    `anchor`: the entry at which all of it was known to exist. `what`: for the message.

    Raises:
        SnapshotExpiredError: some of it was swept, or may have been: `anchor` is before the horizon.
    """
    if anchor < view.horizon():
        raise SnapshotExpiredError(
            f"{what} relies on objects as of log entry {anchor}, before the horizon {view.horizon()}: they may be gone"
        )
    condemned = list[ObjectKey]()
    for key in needed:
        state = view.object_state(key)
        if state is not None and state.swept:
            raise SnapshotExpiredError(f"{what} needs {key.name}, which gc freed", object_id=key.name)
        if state is not None:
            condemned.append(key)
    return Objects(condemned)


def rescue(view: RefTable, needed: Iterable[ObjectKey], anchor: int, what: str) -> list[Op]:
    """The operation that rescues what `condemned_among` finds, if anything."""
    condemned = condemned_among(view, needed, anchor, what)
    return [Op.rescue(condemned)] if condemned else []


def rescue_if_expired(engine: Engine, view: RefTable, info: SnapshotRow) -> list[Op]:
    """Operations for the entry that holds a snapshot again; none if it is still held.

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

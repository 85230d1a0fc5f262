"""A part's extents: the locations of its blocks, followed by those of their delta bases, and of the bases' bases."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, base_count
from tensorstore_ck.format.pack import MAX_BASES, pack_name
from tensorstore_ck.format.part import EXTENT_DTYPE, Extents, Part
from tensorstore_ck.log.block_index import Base, Location

MAX_DEPTH: Final = 200
"""The longest chain of bases. Only a block that is not a base has several bases."""

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
    wanted, base_ids = [places[block] for block in ids], list[Digest]()
    first_base: dict[int, int] = {}
    """Row -> row of its first base."""
    shared: dict[tuple[Digest, ...], int] = {}
    row = 0
    while row < len(wanted):  # `wanted` grows in the loop
        bases = wanted[row].bases
        if bases:
            key = tuple(base.block for base in bases)
            if row < len(ids) and key in shared:
                first_base[row] = shared[key]
            else:
                first_base[row] = shared[key] = len(wanted)
                wanted += [base.location if base.location is not None else places[base.block] for base in bases]
                base_ids += key
        row += 1
    for place in wanted:
        numbers.setdefault(place.pack, len(numbers))
    rows = [
        (numbers[place.pack], place.entry, place.offset, place.stored, place.raw, first_base.get(row, -1), place.codec, place.flags)
        for row, place in enumerate(wanted)
    ]
    return PartExtents(list(numbers), np.array(rows, EXTENT_DTYPE), b"".join(base_ids))


def with_bases(place: Location, places: Mapping[Digest, Location]) -> Location:
    """The same location with the locations of all its bases, so that another part can use it."""
    bases = tuple(base if base.location is not None else Base(base.block, with_bases(places[base.block], places)) for base in place.bases)
    return place._replace(bases=bases)


def location_of(part: Part, packs: Sequence[Ulid], extents: Extents, row: int, depth: int = 0) -> Location:
    """The location of the block in a row of located `extents`, with its chain of bases.

    Raises:
        CorruptObjectError: its bases are not valid rows, or too many.
    """
    chain, bases = list[Location](), list[int]()
    while True:  # not by recursion: chains of differences are long
        pack, entry, offset, stored, raw, first, codec, flags = extents[row].item()
        count, level = base_count(codec, flags), depth + len(chain)
        if count and not (row < first <= len(extents) - count and count <= MAX_BASES and level < MAX_DEPTH and (count == 1 or not level)):
            raise CorruptObjectError(
                f"{pack_name(packs[pack])}: a part names a block there with invalid delta bases", object_id=pack_name(packs[pack])
            )
        chain.append(Location(packs[pack], entry, offset, stored, raw, codec, (), flags if count else 0))
        bases.append(first)
        if count != 1:
            break
        row = first
    found = chain.pop()
    if count:
        several = range(first, first + count)
        found = found._replace(bases=tuple(Base(part.block_id(base), location_of(part, packs, extents, base, 1)) for base in several))
    for place, base in zip(reversed(chain), reversed(bases[:-1]), strict=True):
        found = place._replace(bases=(Base(part.block_id(base), found),))
    return found


def locations_of(part: Part, packs: Sequence[Ulid], extents: Extents, rows: Sequence[int]) -> list[Location | None]:
    """The locations of the blocks in these rows: see `location_of`. None where the bases are not valid."""
    chosen = extents[list(rows)]
    of_rows, *columns = [chosen[field].tolist() for field in ("pack", "entry", "offset", "stored", "raw", "codec")]
    found: list[Location | None] = [*map(Location, [packs[pack] for pack in of_rows], *columns)]
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

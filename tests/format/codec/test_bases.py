"""What blocks are encoded against: where that lies, and what no part may say of it."""

import numpy as np
import pytest

from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.reachability import MAX_DEPTH, chain_of, extents_of, location_of, locations_of
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import Codec
from tensorstore_ck.format.part import BLOB_DTYPE, EXTENT_DTYPE, Extents, Part
from tensorstore_ck.log.block_index import Base, Location

PACK = Ulid(bytes(16))


def block(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


def part_of(extents: Extents, blocks: int = 1) -> Part:
    ids = b"".join(map(block, range(len(extents))))
    return Part(block(0), 0, 1, np.zeros(1, BLOB_DTYPE), ids[: 32 * blocks], b"", b"", [PACK], extents, ids[32 * blocks :], 0)


def chain(length: int) -> Extents:
    extents = np.zeros(length, EXTENT_DTYPE)
    extents["codec"], extents["base"] = Codec.DELTA, np.arange(1, length + 1)
    extents["codec"][-1], extents["base"][-1] = Codec.RAW, -1
    return extents


def test_a_chain_is_followed_to_its_end_unless_it_is_too_long() -> None:
    extents = chain(50)
    found = location_of(part_of(extents), [PACK], extents, 0)
    assert [place.codec for place in chain_of(found)] == [Codec.DELTA] * 49 + [Codec.RAW]
    refused(chain(MAX_DEPTH + 2))


def refused(extents: Extents) -> None:
    with pytest.raises(CorruptObjectError, match="invalid delta bases"):
        location_of(part_of(extents), [PACK], extents, 0)
    assert locations_of(part_of(extents), [PACK], extents, [len(extents) - 1, 0])[1] is None


@pytest.mark.parametrize(("base", "flags"), [(-1, 1), (0, 1), (9, 1), (10, 1), (8, 3), (1, 65), (1, 60_000)])
def test_bases_that_are_not_there_are_refused(base: int, flags: int) -> None:
    extents = np.zeros(10, EXTENT_DTYPE)
    extents["base"] = -1
    extents[0] = (0, 0, 64, 8, 8, base, Codec.CAST, flags)
    if (base, flags) == (9, 1):
        assert len(location_of(part_of(extents), [PACK], extents, 0).bases) == 1
    else:
        refused(extents)


def test_only_bases_of_blocks_that_are_no_bases_have_several_bases() -> None:
    """Else a few rows would mean more blocks than there are in the world."""
    extents = np.zeros(10, EXTENT_DTYPE)
    extents["base"] = -1
    extents[0] = (0, 0, 64, 8, 8, 1, Codec.CAST, 2)
    extents[1] = (0, 0, 64, 8, 8, 3, Codec.CAST, 2)
    assert len(list(chain_of(location_of(part_of(extents), [PACK], extents, 0)))) == 5
    extents[3] = (0, 0, 64, 8, 8, 5, Codec.CAST, 2)
    refused(extents)


def test_extents_have_the_locations_that_they_were_made_of() -> None:
    plain = [Location(PACK, number, 64 * number, 10, 20, Codec.RAW) for number in range(4)]
    delta = Location(PACK, 4, 500, 5, 20, Codec.DELTA, (Base(block(0), plain[0]),), 3)
    deeper = Location(PACK, 5, 600, 5, 20, Codec.DELTA, (Base(block(4), delta),), 1)
    cast = Location(PACK, 6, 700, 8, 20, Codec.CAST, (Base(block(5), deeper), Base(block(2), None)), 2)
    places = dict(zip(map(block, range(7)), [*plain, delta, deeper, cast], strict=True))
    ids = [block(number) for number in (6, 5, 4, 6, 2)]
    made = extents_of(ids, places)
    part = part_of(made.rows)._replace(ids=b"".join(ids), base_ids=made.base_ids)
    together = locations_of(part, made.packs, made.rows, range(len(ids)))
    for row, name in enumerate(ids):
        found = location_of(part, made.packs, made.rows, row)
        assert together[row] == found
        wanted = places[name]
        assert [place[:6] for place in chain_of(found)] == [place[:6] for place in _resolved(wanted, places)]
    assert made.rows["base"].max() < len(made.rows)


def _resolved(place: Location, places: dict[Digest, Location]) -> list[Location]:
    bases = [base.location if base.location is not None else places[base.block] for base in place.bases]
    return [place, *(each for base in bases for each in _resolved(base, places))]

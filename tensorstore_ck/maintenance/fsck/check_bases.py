"""The bases of the differences and casts that a part names, for fsck; and a part's rows by pack."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import DIGEST_BYTES, Ulid
from tensorstore_ck.engine.reachability import BlockLocations, grouped, location_of, require_bases
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import CODECS_WITH_BASES, base_count
from tensorstore_ck.format.pack import Footer, pack_name
from tensorstore_ck.format.part import Extents, Part
from tensorstore_ck.maintenance.fsck.check_packs import Ids, Packs


def block_ids(part: Part) -> Ids:
    """The ids of a part's extents, row by row."""
    return np.frombuffer(part.ids + part.base_ids, np.uint8).reshape(-1, DIGEST_BYTES)


def by_pack(locations: BlockLocations) -> Iterator[tuple[Ulid, npt.NDArray[np.int64]]]:
    """(pack, rows of the extents) for each pack in use; a pack may be yielded twice."""
    for number, rows in grouped(locations.extents["pack"]):
        yield locations.packs[number], rows


class WrongBases(NamedTuple):
    """Rows of a part whose blocks cannot be decoded."""

    rows: npt.NDArray[np.bool_]
    message: str


def wrong_bases(packs: Packs, part: Part, locations: BlockLocations) -> WrongBases | None:
    """The blocks whose bases are no valid rows, or are not those in their pack's footer: earlier builds merged equal blocks."""
    rows, message = np.zeros(len(part.extents), np.bool_), ""
    try:
        require_bases(part, locations.packs, locations.extents)
    except CorruptObjectError as exc:
        message = str(exc)
        for row in np.flatnonzero(_with_bases(locations.extents)).tolist():
            try:
                location_of(part, locations.packs, locations.extents, row)
            except CorruptObjectError:
                rows[row] = True
    ids = block_ids(part)
    for pack, own in by_pack(locations):
        own = own[_with_bases(locations.extents[own])]
        footer = packs.footer(pack) if len(own) else None
        if not isinstance(footer, Footer):
            continue
        for row in own.tolist():
            _, entry, _, _, _, first, codec, flags = locations.extents[row].item()
            named = [ids[base].tobytes() for base in range(first, min(first + base_count(codec, flags), len(ids)))]
            if entry < len(footer.entries) and named != [*map(bytes, footer.bases_of(entry))]:
                rows[row] = True
                message = message or f"{pack_name(pack)}: a part names a block there with other bases"
    return WrongBases(rows, message) if message else None


def spread_to_deltas(extents: Extents, hit: npt.NDArray[np.bool_]) -> None:
    """Adds to the rows in `hit` those that need them: damage to a base affects its deltas, which are in earlier rows."""
    for row in np.flatnonzero(extents["base"] != -1)[::-1].tolist():
        first = int(extents["base"][row])
        count = base_count(int(extents["codec"][row]), int(extents["flags"][row]))
        hit[row] |= bool(hit[first : first + count].any())


def _with_bases(extents: Extents) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = np.isin(extents["codec"], [int(codec) for codec in CODECS_WITH_BASES])
    return found

"""Relocation maps (objects under ``moved/``) whose log entry is lost: which of them may be used again.

A map lists verified copies, and its seal proves that it is undamaged. But it may never have been committed. So it is used only where it
cannot do harm: its pack is gone, so its blocks cannot be read otherwise; or its targets exist, and their footers list the blocks that
the map says. Maps and packs that gc swept are never used. Each snapshot that it leads to is checked against the ids in its parts.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid, parse_ulid
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.pack import Footer
from tensorstore_ck.format.relocation import RelocationMap, decode_relocation
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES, object_hash
from tensorstore_ck.log import ObjectKey, RefTable, Relocation, table_rows
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.log.object_set import join_ulids
from tensorstore_ck.maintenance.fsck.check_packs import Packs
from tensorstore_ck.maintenance.fsck.findings import require_reachable


class LostRelocation(NamedTuple):
    """A relocation map that the log does not name."""

    ulid: Ulid
    hash: Digest
    moved: RelocationMap


def read_lost_relocations(backend: Backend, view: RefTable) -> list[LostRelocation]:
    """The relocation maps that `view` does not know, and that gc did not sweep."""
    in_force = {moved for _, moved in view.all_relocations()}
    lost = []
    for info in backend.list("moved/"):
        ulid = parse_ulid(info.name[-26:])
        if ulid is None or ulid in in_force or info.name != ObjectKey("moved", ulid).name or _is_swept(view, ObjectKey("moved", ulid)):
            continue
        try:
            data = backend.get(info.name, max_bytes=MAX_OBJECT_BYTES)
            moved = decode_relocation(data, info.name, object_hash(data))
        except StoreError as exc:
            require_reachable(backend, exc)
            continue
        lost.append(LostRelocation(ulid, object_hash(data), moved))
    return lost


def learn_locations(view: RefTable, unknown: Iterable[LostRelocation], placed: ColdLocations) -> None:
    """Adds the locations of packs to `placed`: from the log, from relocation maps, and by listing."""
    placed.add_locations(view.locations())
    for relocation in unknown:
        if relocation.moved.location is not None:
            placed.add_locations(dict.fromkeys(relocation.moved.targets, relocation.moved.location))
    for url in sorted(set(placed.locations().values())):
        packs = (parse_ulid(info.name[-26:]) for info in placed.at(url).list("packs/"))
        placed.add_locations({pack: url for pack in packs if pack is not None})


def find_relocations(packs: Packs, view: RefTable, unknown: Iterable[LostRelocation]) -> Iterator[Relocation]:
    """Usable relocations that `view` does not know; they count as older than all known ones."""
    for ulid, moved_hash, moved in unknown:
        pack = ObjectKey("pack", moved.pack)
        if pack.ulid not in packs.listed or _is_swept(view, pack) or _holds(packs, view, moved):
            yield Relocation(pack=moved.pack, moved=ulid, n=0, hash=moved_hash, targets=tuple(moved.targets))


def add_relocations(table: MemoryTable, relocations: list[Relocation]) -> None:
    """Adds relocations to a ref table."""
    with table.batch() as batch:
        for relocation in relocations:
            row = table_rows.RelocationRow(relocation.n, relocation.hash, join_ulids(relocation.targets))
            table_rows.RELOCATIONS.put(batch, relocation.pack + relocation.moved, row)


def _holds(packs: Packs, view: RefTable, moved: RelocationMap) -> bool:
    """Whether the targets have the pack's blocks; for a pack without a footer, whether they have such entries at all."""
    source = packs.footer(moved.pack)
    for number, target in enumerate(moved.targets):
        lines = moved.rows[moved.rows["target"] == number]
        footer = packs.footer(target)
        if target not in packs.listed or _is_swept(view, ObjectKey("pack", target)) or not isinstance(footer, Footer):
            return False
        if len(lines) and int(lines["entry"].max()) >= len(footer.entries):
            return False
        there = footer.entries[lines["entry"]]
        if any(not np.array_equal(there[column], lines[column]) for column in ("offset", "stored", "codec")):
            return False
        if isinstance(source, Footer) and (
            (len(lines) and int(lines["from"].max()) >= len(source.entries))
            or not np.array_equal(there["id"], source.entries[lines["from"]]["id"])
        ):
            return False
    return True


def _is_swept(view: RefTable, key: ObjectKey) -> bool:
    state = view.object_state(key)
    return state is not None and state.swept

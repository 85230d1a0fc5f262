"""Whether damage can be repaired from the store itself: other copies of blocks, and rebuilt relocation maps.

It reads footers and parts, no data, and only if something is damaged. fsck reports these repairs, and `repair` does them.

The marks of snapshots that repair found damaged, on any host, are how the store remembers damage that only reading data finds.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress

import numpy as np

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.reachability import BlockLocations, location_of
from tensorstore_ck.errors import CorruptObjectError, StoreError
from tensorstore_ck.format.codec import CODECS_WITH_BASES
from tensorstore_ck.format.pack import ENTRY_DTYPE, Entries, Footer
from tensorstore_ck.format.part import Part, decode_part, part_name
from tensorstore_ck.format.record import record_name
from tensorstore_ck.format.relocation import RELOCATION_DTYPE, RelocationMap, decode_relocation
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES, object_hash
from tensorstore_ck.log import ObjectKey, RefTable, Relocation, SnapshotRow
from tensorstore_ck.log.block_index import Location
from tensorstore_ck.maintenance.fsck.check_bases import block_ids, by_pack
from tensorstore_ck.maintenance.fsck.check_packs import BlockTables, Links, Packs, find_copies, links_of
from tensorstore_ck.maintenance.fsck.check_snapshot import describe_hit, placed_parts
from tensorstore_ck.maintenance.fsck.findings import DAMAGED, UNREADABLE, Findings, Severity, kind_of, require_reachable


def repair_command(*, reads_data: bool = False) -> str:
    """The command that repairs; `reads_data` if only a check that reads data finds the damage."""
    return f"`tsck fsck {'--read-data ' if reads_data else ''}--repair`"


def other_store_advice(*, reads_data: bool = False) -> str:
    """The advice if this store has no good copy."""
    return f"{repair_command(reads_data=reads_data)[:-1]} --from OTHER_STORE` takes it from a store that has it"


def pack_advice(packs: Packs, hit: BlockTables, *, reads_data: bool) -> dict[Ulid, tuple[str, bool]]:
    """Damaged pack -> (advice, whether this store alone can repair it).

    `hit`: the unreadable blocks; `reads_data`: whether data was read to find them.
    """
    wanted = set[Digest]().union(*(hit.ids(pack) for pack in hit.packs))
    copies = find_copies(packs, wanted, unless={pack: set(hit.entries(pack)) for pack in hit.packs})
    advice = {}
    for pack in hit.packs:
        ids, needs_data = hit.ids(pack), pack in packs.bad or (reads_data and pack in packs.listed)
        lost = len(ids - copies.keys())
        if lost:
            other = other_store_advice(reads_data=needs_data)
            advice[pack] = (f"{lost} of {len(ids)} damaged blocks have no other copy in this store: {other}", False)
        else:
            advice[pack] = (
                f"every damaged block is in other packs, too: {repair_command(reads_data=needs_data)} takes it from there",
                True,
            )
    return advice


def readable_parts(engine: Engine, parts: Iterable[Ulid]) -> Iterator[tuple[Ulid, Part]]:
    """The readable ones of some parts."""
    for ulid in parts:
        name = part_name(ulid)
        try:
            yield ulid, decode_part(engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES), name)
        except StoreError as exc:
            require_reachable(engine.backend, exc)


def blocks_in(packs: Collection[Ulid], parts: Iterable[tuple[Part, BlockLocations]]) -> BlockTables:
    """The blocks in some packs, as parts name them."""
    tables = BlockTables()
    for part, locations in parts:
        ids = block_ids(part)
        for pack, rows in by_pack(locations):
            if pack in packs:
                tables.add(pack, locations.extents[rows], ids[rows])
    return tables


def deltas_in(packs: Collection[Ulid], parts: Iterable[tuple[Part, BlockLocations]]) -> dict[Digest, list[Location]]:
    """The differences in some packs, as parts name them with their bases; without what no part names with valid bases."""
    found: dict[Digest, dict[Links, Location]] = {}
    for part, locations in parts:
        ids = block_ids(part)
        for pack, rows in by_pack(locations):
            codecs = locations.extents["codec"][rows] if pack in packs else rows[:0]
            for row in rows[: len(codecs)][np.isin(codecs, [int(codec) for codec in CODECS_WITH_BASES])].tolist():
                with suppress(CorruptObjectError):  # the check reports such a part
                    place = location_of(part, locations.packs, locations.extents, row)
                    found.setdefault(Digest(ids[row].tobytes()), {})[links_of(place)] = place
    return {block: [*places.values()] for block, places in found.items()}


def relocations_in_force(view: RefTable) -> dict[Ulid, Relocation]:
    """The relocations in force, by the names of their maps."""
    packs = {pack for pack, _ in view.all_relocations()}
    return {relocation.moved: relocation for pack in packs for relocation in view.relocations(pack)}


def is_moved_intact(backend: Backend, relocation: Relocation) -> bool:
    """Whether the map of a relocation is the one that the log names, or unreadable. If the named map is useless, the log entry is false."""
    name = ObjectKey("moved", relocation.moved).name
    try:
        decode_relocation(backend.get(name, max_bytes=MAX_OBJECT_BYTES), name, relocation.hash)
    except StoreError as exc:
        require_reachable(backend, exc)
        return kind_of(exc) == UNREADABLE
    return True


def rebuild_moved(packs: Packs, relocation: Relocation, parts: Iterable[tuple[Ulid, Part]]) -> bytes | None:
    """Rebuilds the map of a relocation from the footers of both sides; None if its hash is not the one in the log.

    If the pack is gone, the parts that name its blocks replace its footer.
    """
    targets: dict[bytes, tuple[int, ...]] = {}
    for number, target in enumerate(relocation.targets):
        footer = packs.footer(target)
        if not isinstance(footer, Footer):
            return None
        for entry, (block, offset, _, stored, _, codec, _, _) in enumerate(footer.entries.tolist()):
            targets.setdefault(block, (number, entry, stored, offset, codec))
    source = packs.footer(relocation.pack)
    entries = source.entries if isinstance(source, Footer) else _entries_from_parts(relocation.pack, parts)
    rows = [(entry, *targets[row[0]], 0, 0) for entry, row in enumerate(entries.tolist()) if row[4] and row[0] in targets]
    if not rows:
        return None
    encoded = RelocationMap(relocation.pack, relocation.targets, np.array(rows, RELOCATION_DTYPE)).encode()
    return encoded if object_hash(encoded) == relocation.hash else None


def _entries_from_parts(pack: Ulid, parts: Iterable[tuple[Ulid, Part]]) -> Entries:
    as_written = ((part, BlockLocations(list(part.packs), part.extents, frozenset())) for _, part in parts)
    tables = blocks_in({pack}, as_written)
    return tables.packs.get(pack, np.zeros(0, ENTRY_DTYPE))


def packs_of_marked(engine: Engine) -> set[Ulid]:
    """The packs of the snapshots that are marked as damaged."""
    return {pack for info in _marked_damaged(engine) for pack in packs_of(engine, info)}


def packs_of(engine: Engine, info: SnapshotRow) -> set[Ulid]:
    """The packs of a snapshot, as far as its parts can be read."""
    return {pack for _, locations in placed_parts(engine, info) for pack in locations.packs}


def check_marks(engine: Engine, findings: Findings, *, damaged: Collection[Ulid], read: Collection[Ulid]) -> None:
    """Adds findings for marked snapshots: damaged, unless this check read all their data.

    `engine` is at the log that was checked. `damaged`: snapshots that this check found damaged. `read`: packs whose blocks it read all.
    """
    for info in _marked_damaged(engine):
        if info.ulid in damaged:
            continue
        is_whole = packs_of(engine, info) <= set(read)
        if is_whole:
            message = f"it is marked as damaged ({info.reason}), and is intact now: {repair_command(reads_data=True)} removes the mark"
        else:
            message = (
                f"it is marked as damaged ({info.reason}), and this check did not read all its data: {other_store_advice(reads_data=True)}"
            )
        address = info.ref if info.step is None else f"{info.ref}@{info.step}"
        severity: Severity = "notice" if is_whole else "error"
        hit = describe_hit([address], info, ())
        findings.add("marked_damaged", record_name(info.ulid), message, hit=hit, severity=severity, repairable=is_whole)


def _marked_damaged(engine: Engine) -> Iterator[SnapshotRow]:
    return (info for info in engine.log.view().snapshots() if info.mark == DAMAGED)

"""Checks one snapshot for fsck and salvage: record, parts, layout, and every extent against the packs.

It bypasses all caches. It returns damage with the affected tensors, and never raises it.

`AffectedTensors` keeps the first part of each layout open, which has the layout and the values. The caller passes the other parts and rank
states one after another, so memory does not grow with the number of ranks.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import DIGEST_BYTES, Ulid
from tensorstore_ck.engine.engine import Engine, decode_named_part
from tensorstore_ck.engine.reachability import BlockLocations, locate_blocks, location_of
from tensorstore_ck.engine.read.snapshot_reader import SnapshotReader
from tensorstore_ck.errors import CorruptObjectError, StoreError
from tensorstore_ck.format.block_assignment import assign_blocks, first_rank_with_layout, regions_of_rank
from tensorstore_ck.format.layout import ExplicitRegions
from tensorstore_ck.format.pack import Footer, pack_name
from tensorstore_ck.format.part import Extents, Part, part_name
from tensorstore_ck.format.record import Record, decode_record, record_name
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES, object_hash
from tensorstore_ck.format.tree import parse
from tensorstore_ck.log import ObjectKey, SnapshotRow
from tensorstore_ck.maintenance.describe import blob_rows, names_of_blobs, part_prefix
from tensorstore_ck.maintenance.fsck.check_bases import block_ids, by_pack, spread_to_deltas, wrong_bases
from tensorstore_ck.maintenance.fsck.check_packs import Ids, Packs
from tensorstore_ck.maintenance.fsck.findings import kind_of, require_reachable

MAX_NAMED: Final = 10
"""Tensors named per snapshot."""


class Damage(NamedTuple):
    """Makes a snapshot unreadable, completely or in part."""

    kind: str
    object: str
    message: str
    names: tuple[str, ...]
    """Affected tensors and values; empty for all of them."""
    blocks: "DamagedBlocks | None" = None
    """Affected blocks, if the object is a pack."""


class DamagedBlocks(NamedTuple):
    """Blocks of a pack that a part refers to, and that are missing or different."""

    pack: Ulid
    extents: Extents
    ids: Ids


class SnapshotCheck(NamedTuple):
    """The result for one snapshot."""

    damages: Sequence[Damage]
    needs: frozenset[ObjectKey]
    """Its closure: record, parts, relocation maps, packs."""
    object_bytes: int
    """Size of its record and parts."""
    is_complete: bool
    """Whether `needs` has everything that it refers to."""
    anchor: int = 0
    """The highest anchor of its parts: its log entry came later."""


class _PartProblem(NamedTuple):
    kind: str
    object: str
    message: str
    rows: npt.NDArray[np.bool_]
    """Mask of the affected extents."""
    blocks: DamagedBlocks


def require_intact(engine: Engine, info: SnapshotRow) -> None:
    """Checks the structure of a snapshot. Raises `CorruptObjectError` if it is damaged."""
    for damage in check_snapshot(engine, Packs(engine.backend, {}), info, read_data=False).damages:
        raise CorruptObjectError(f"{damage.object}: {damage.message}", object_id=damage.object)


def check_snapshot(engine: Engine, packs: Packs, info: SnapshotRow, *, read_data: bool) -> SnapshotCheck:
    """Checks a snapshot at the head that `engine` has folded.

    `read_data`: the data of `packs` was checked; reads here the blocks of packs without a usable footer.
    """
    damages: list[Damage] = []
    needs = {ObjectKey("snapshot", info.ulid)}
    record, size = _read_record(engine, info, damages)
    if record is None:
        return SnapshotCheck(damages, frozenset(needs), size, is_complete=False)
    needs.update(ObjectKey("part", part) for part in record.parts)
    anchor, hits, lost = 0, AffectedTensors(engine=engine, info=info, record=record, world_size=0, layout_of=None), dict[int, Damage]()
    for rank, ulid in enumerate(record.parts):
        part, part_bytes = _read_part(engine, record, rank)
        size += part_bytes
        if isinstance(part, Damage):
            lost[rank] = part
            continue
        if not hits.is_known(rank):
            hits = AffectedTensors(engine=engine, info=info, record=record, world_size=part.world_size, layout_of=part.layout_of)
        anchor = max(anchor, part.anchor)
        locations = _locate(engine, part)
        if isinstance(locations, Damage):
            lost[rank] = locations
            continue
        needs.update(locations.objects())
        if (wrong := wrong_bases(packs, part, locations)) is not None:
            spread_to_deltas(locations.extents, wrong.rows)
            damages.append(Damage("corrupt_object", part_name(ulid), wrong.message, tuple(hits.names(part, wrong.rows))))
        problems = list(_extent_problems(packs, part=part, locations=locations, record=record, rank=rank, read_data=read_data))
        misfit = hits.problem(part, part_name(ulid))
        layout_rows = slice(0, int(part.blobs["blocks"][0]))
        if misfit is not None and not any(problem.rows[layout_rows].any() for problem in problems):
            damages.append(Damage(kind_of(misfit), misfit.object_id or part_name(ulid), str(misfit), tuple(hits.names_of_lost(rank))))
        damages += [Damage(it.kind, it.object, it.message, tuple(hits.names(part, it.rows)), blocks=it.blocks) for it in problems]
    damages += [damage._replace(names=tuple(hits.names_of_lost(rank))) for rank, damage in lost.items()]
    return SnapshotCheck(damages=damages, needs=frozenset(needs), object_bytes=size, is_complete=not lost, anchor=anchor)


def parts_of(engine: Engine, info: SnapshotRow) -> Iterator[Part]:
    """The readable parts of a snapshot."""
    damages: list[Damage] = []
    record, _ = _read_record(engine, info, damages)
    if record is not None:
        parts = (_read_part(engine, record, rank)[0] for rank in range(len(record.parts)))
        yield from (part for part in parts if isinstance(part, Part))


def placed_parts(engine: Engine, info: SnapshotRow) -> Iterator[tuple[Part, BlockLocations]]:
    """The readable parts of a snapshot, and the locations of their blocks."""
    for part in parts_of(engine, info):
        locations = _locate(engine, part)
        if isinstance(locations, BlockLocations):
            yield part, locations


def rebuilt_record(info: SnapshotRow, record: Record, parts: Sequence[Ulid]) -> Record:
    """The record as repair rebuilds it: fields from the log, and the content under its root. Only such a record may replace another."""
    return record._replace(
        ref=info.ref,
        step=info.step,
        parent=info.parent,
        metrics={},
        time_ns=info.arrived_ns,
        triggers=(),
        epoch=None,
        attributes=None,
        parts=list(parts),
        logical_bytes=info.logical_bytes,
        new_bytes=info.new_bytes,
    )


def _read_record(engine: Engine, info: SnapshotRow, damages: list[Damage]) -> tuple[Record | None, int]:
    name, size = record_name(info.ulid), 0
    try:
        data = engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
        size = len(data)
        record = decode_record(data, name)
        is_remade = record == rebuilt_record(info, record, record.parts)
        if (object_hash(data) != info.record and not is_remade) or record.root() != info.root:
            raise CorruptObjectError(f"{name} is not the record that the log names", object_id=name)
    except StoreError as exc:
        require_reachable(engine.backend, exc)
        damages.append(Damage(kind_of(exc), name, str(exc), ()))
        return None, size
    return record, size


def _read_part(engine: Engine, record: Record, rank: int) -> tuple[Part | Damage, int]:
    """A part, or why it cannot be read; and its size."""
    ulid = record.parts[rank]
    name, size = part_name(ulid), 0
    try:
        data = engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
        size = len(data)
        part = decode_named_part(data, record, rank)
    except StoreError as exc:
        require_reachable(engine.backend, exc)
        return Damage(kind_of(exc), name, str(exc), ()), size
    engine.keep_part(ulid, part)  # the reader needs it next
    return part, size


def _locate(engine: Engine, part: Part) -> BlockLocations | Damage:
    """The locations of a part's blocks, or why they are unknown."""
    try:
        return locate_blocks(engine, engine.log.view(), part)
    except StoreError as exc:
        require_reachable(engine.backend, exc)
        return Damage(kind_of(exc), exc.object_id, f"{exc} (it locates moved blocks)", ())


def _extent_problems(
    packs: Packs, part: Part, locations: BlockLocations, record: Record, rank: int, *, read_data: bool
) -> Iterator[_PartProblem]:
    """Compares extents with the footers and sizes of packs, and with the known bad blocks."""
    ids = block_ids(part)
    for pack, rows in by_pack(locations):
        name, extents = pack_name(pack), locations.extents[rows]
        footer = packs.footer(pack)
        if isinstance(footer, Footer):
            wrong: npt.NDArray[np.bool_] = _not_in_footer(footer, extents, ids[rows])
            kind, message = (
                "corrupt_object",
                f"{name} does not hold what {part_name(record.parts[rank])} refers to: it was replaced or swapped",
            )
            bad = packs.bad.get(pack)
            if bad is not None:
                kind, message = (kind, message) if wrong.any() else (bad.kind, bad.message)
                wrong |= np.isin(extents["entry"], np.fromiter(bad.entries, np.int64))
        else:
            wrong = _unreachable(packs, part, locations, rows, read_data=read_data and footer.kind != "missing_object")
            kind, message = packs.problems.get(pack, footer)  # a block that cannot be read makes the pack unreadable, not damaged
        if wrong.any():
            hit = np.zeros(len(part.extents), np.bool_)
            hit[rows[wrong]] = True
            spread_to_deltas(locations.extents, hit)
            yield _PartProblem(kind, object=name, message=message, rows=hit, blocks=DamagedBlocks(pack, extents[wrong], ids[rows][wrong]))


def _not_in_footer(footer: Footer, extents: Extents, ids: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    inside = extents["entry"] < len(footer.entries)
    entries = footer.entries[np.where(inside, extents["entry"], 0)] if len(footer.entries) else None
    if entries is None:
        return ~inside
    same = inside & (np.ascontiguousarray(entries["id"]).view(np.uint8).reshape(-1, DIGEST_BYTES) == ids).all(axis=1)
    for column in ("offset", "stored", "raw", "codec"):
        same &= entries[column] == extents[column]
    differs: npt.NDArray[np.bool_] = ~same
    return differs


def _unreachable(
    packs: Packs, part: Part, locations: BlockLocations, rows: npt.NDArray[np.int64], *, read_data: bool
) -> npt.NDArray[np.bool_]:
    """The blocks beyond the end of a pack without a usable footer; with `read_data`, also damaged ones."""
    extents, ids = locations.extents[rows], block_ids(part)
    listed = packs.listed.get(locations.packs[int(extents["pack"][0])])
    if listed is None:
        return np.ones(len(extents), np.bool_)
    wrong: npt.NDArray[np.bool_] = extents["offset"] + extents["stored"] > listed.size_bytes
    for at in np.flatnonzero(~wrong).tolist() if read_data else ():
        row = int(rows[at])
        try:
            place = location_of(part, locations.packs, locations.extents, row)
        except CorruptObjectError:
            wrong[at] = True
        else:
            wrong[at] = not packs.is_intact(place, ids[row].tobytes())
    return wrong


def merge_damages(damages: Iterable[Damage]) -> Iterator[Damage]:
    """One damage per kind and object, with the affected names of all parts, without blocks."""
    merged: dict[tuple[str, str], Damage] = {}
    for damage in damages:
        known = merged.setdefault((damage.kind, damage.object), damage)
        names = tuple(dict.fromkeys((*known.names, *damage.names))) if known.names and damage.names else ()
        merged[damage.kind, damage.object] = known._replace(names=names, blocks=None)
    yield from merged.values()


def describe_hit(addresses: Sequence[str], info: SnapshotRow, names: Sequence[str]) -> str:
    """``runs/gpt@1000 (root 9f86d081...): tensors``."""
    where, more = ", ".join(addresses) or "no ref", len(names) - MAX_NAMED
    shown = [*names[:MAX_NAMED], *([f"and {more} more"] if more > 0 else [])]
    return f"{where} (root {info.root.hex()[:12]}): {', '.join(shown) or 'all of it'}"


NOTHING: Final = ("no tensor: it restores, but is not whole",)
"""Affected by the loss of a part without bytes."""


class AffectedTensors:
    """The layouts of one snapshot's parts."""

    def __init__(self, engine: Engine, info: SnapshotRow, record: Record, world_size: int, layout_of: bytes | None) -> None:
        """`world_size`, `layout_of`: as in any of the ranks' parts; 0 and None if none can be read."""
        self._engine = engine
        self._info = info
        self._record = record
        self._world_size = world_size
        self._layout_of = layout_of
        self._readers: dict[int, SnapshotReader | StoreError] = {}
        self._alone: tuple[int, SnapshotReader | StoreError] | None = None
        """The rank state that was opened last."""

    def is_known(self, rank: int) -> bool:
        """Whether the layout of part `rank` is known."""
        return self._layout_of is not None or 0 < self._world_size <= rank

    def first(self, rank: int) -> int:
        """The first part with the layout of part `rank`."""
        return rank if self._layout_of is None or rank >= self._world_size else first_rank_with_layout(self._layout_of, rank)

    def problem(self, part: Part, name: str) -> StoreError | None:
        """Why a part does not fit its layout; for the part that has the layout, why layout, values or tree cannot be read."""
        first = self.first(part.rank)
        reader = self._reader(first)
        if isinstance(reader, StoreError):
            return reader if first == part.rank else None
        try:
            reader.plan_of(part, name)
        except StoreError as exc:
            return exc
        return None

    def names(self, part: Part, rows: npt.NDArray[np.bool_]) -> Sequence[str]:
        """The names with a block in the extent rows that are set in `rows`; empty for all."""
        reader = self._reader(self.first(part.rank))
        if isinstance(reader, StoreError):
            return self._whole(part.rank)
        try:
            plan = reader.plan_of(part, reader.name)
        except StoreError:
            return self.names_of_lost(part.rank)
        names = names_of_blobs(reader, [blob for blob in range(1, len(part.blobs)) if _any(rows, blob_rows(part, blob))])
        tensors = enumerate(reader.layout.tensors)
        names += [spec.name for number, spec in tensors if any(_any(rows, held.rows) for held in plan.of(number))]
        return [part_prefix(part) + name for name in names]

    def names_of_lost(self, rank: int) -> Sequence[str]:
        """The names that cannot be restored without part `rank`; empty for all."""
        first = self.first(rank)
        reader = self._reader(first) if first != rank else None
        if not isinstance(reader, SnapshotReader):
            return self._whole(rank)
        layout = reader.layout
        explicit = {number for number, spread in enumerate(layout.spreads) if isinstance(spread, str)}
        held = regions_of_rank(layout, rank, reader.ranks, [ExplicitRegions(number, ()) for number in explicit])
        owned = {held[share.region].tensor for share in assign_blocks(layout, held, rank, self._engine.config.block_bytes)}
        return [layout.tensors[number].name for number in sorted(owned | explicit)] or NOTHING

    def _whole(self, rank: int) -> Sequence[str]:
        """The affected names if the layout of part `rank` is unreadable."""
        return [f"rank_state[{rank - self._world_size}]"] if 0 < self._world_size <= rank else ()

    def _reader(self, first: int) -> SnapshotReader | StoreError:
        """The first part of a layout, opened and with a sound tree; or why that is impossible."""
        if self._alone is not None and self._alone[0] == first:
            return self._alone[1]
        if first in self._readers:
            return self._readers[first]
        opened = self._open(first)
        if first >= self._world_size:
            self._alone = first, opened
        else:
            self._readers[first] = opened
        return opened

    def _open(self, first: int) -> SnapshotReader | StoreError:
        try:
            reader = SnapshotReader(self._engine, self._info, first, record=self._record)
            parse(reader.layout, len(reader.values), f"the layout of {reader.name}")
        except StoreError as exc:
            require_reachable(self._engine.backend, exc)
            return exc
        return reader


def _any(rows: npt.NDArray[np.bool_], chosen: range) -> bool:
    return bool(rows[chosen.start : chosen.stop].any())

"""Checks one snapshot: record, parts, layout, and that every extent is where the packs say. For fsck and salvage.

Reads past every cache. Damage is returned, never raised, with the tensors that it hits: what a restore would fail on.
"""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.engine import Engine
from tensorstore_ck.envelope import MAX_OBJECT_BYTES, object_hash
from tensorstore_ck.errors import CorruptObjectError, StoreError
from tensorstore_ck.fsck.findings import require_reachable
from tensorstore_ck.fsck.packcheck import Packs
from tensorstore_ck.ids import DIGEST_BYTES, Ulid
from tensorstore_ck.inspection import names_of_rows
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.pack import Footer, pack_name
from tensorstore_ck.part import Extents, Part, decode_part, part_name
from tensorstore_ck.reader import SnapshotReader
from tensorstore_ck.record import Record, decode_record, record_name
from tensorstore_ck.tree import parse

MAX_NAMED: Final = 10
"""Tensors that are named for each snapshot."""


class Damage(NamedTuple):
    """What makes a snapshot unreadable, wholly or in part."""

    kind: str
    object: str
    message: str
    names: tuple[str, ...]
    """Tensors and values that are hit; empty for all of them."""


class SnapshotCheck(NamedTuple):
    """Outcome for one snapshot."""

    damages: Sequence[Damage]
    parts: Sequence[Ulid]
    packs: Sequence[Ulid]
    object_bytes: int
    """Of its record and parts."""
    is_complete: bool
    """Whether `parts` and `packs` are all that it refers to."""
    anchor: int = 0
    """The highest of its parts: its log entry came later."""


class _PartProblem(NamedTuple):
    kind: str
    object: str
    message: str
    rows: npt.NDArray[np.bool_]
    """Which extents are hit."""


def check_snapshot(engine: Engine, packs: Packs, info: SnapshotInfo, *, read_data: bool) -> SnapshotCheck:
    """Checks a snapshot; `read_data` says that `packs` had its data checked, and reads blocks that this could not reach."""
    damages: list[Damage] = []
    seen_packs: dict[Ulid, None] = {}
    record, size = _read_record(engine, info, damages)
    if record is None:
        return SnapshotCheck(damages, (), (), size, is_complete=False)
    is_complete, anchor = True, 0
    for rank in range(len(record.parts)):
        part, part_bytes = _read_part(engine, record, rank, damages)
        size += part_bytes
        if part is None:
            is_complete = False
            continue
        anchor = max(anchor, part.anchor)
        seen_packs.update(dict.fromkeys(part.packs))
        problems = list(_extent_problems(packs, part, record, rank, read_data=read_data))
        reader = _open(engine, info)
        layout_rows = slice(0, int(part.blobs["blocks"][0]))
        if isinstance(reader, StoreError) and not any(problem.rows[layout_rows].any() for problem in problems):
            damages.append(Damage(reader.kind, reader.object_id or part_name(record.parts[rank]), str(reader), ()))
        for problem in problems:
            names = names_of_rows(reader, problem.rows) if isinstance(reader, SnapshotReader) else []
            damages.append(Damage(problem.kind, problem.object, problem.message, _bounded(names)))
    return SnapshotCheck(damages, record.parts, tuple(seen_packs), size, is_complete, anchor)


def _read_record(engine: Engine, info: SnapshotInfo, damages: list[Damage]) -> tuple[Record | None, int]:
    name, size = record_name(info.ulid), 0
    try:
        data = engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
        size = len(data)
        record = decode_record(data, name)
        if object_hash(data) != info.record or record.root() != info.root:
            raise CorruptObjectError(f"{name} is not the record that the log names", object_id=name)
    except StoreError as exc:
        require_reachable(engine.backend, exc)
        damages.append(Damage(exc.kind, name, str(exc), ()))
        return None, size
    return record, size


def _read_part(engine: Engine, record: Record, rank: int, damages: list[Damage]) -> tuple[Part | None, int]:
    ulid = record.parts[rank]
    name, size = part_name(ulid), 0
    try:
        data = engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
        size = len(data)
        part = decode_part(data, name)
        if part.part_id() != record.part_ids[rank * DIGEST_BYTES : (rank + 1) * DIGEST_BYTES] or part.rank != rank:
            raise CorruptObjectError(f"{name} is not the part that its snapshot names", object_id=name)
    except StoreError as exc:
        require_reachable(engine.backend, exc)
        damages.append(Damage(exc.kind, name, str(exc), ()))
        return None, size
    engine.keep_part(ulid, part)  # what the reader takes next
    return part, size


def _open(engine: Engine, info: SnapshotInfo) -> SnapshotReader | StoreError:
    """The snapshot, opened: its layout, values and tree are sound; or why they are not, or not this build's to read."""
    try:
        reader = SnapshotReader(engine, info)
        parse(reader.layout, len(reader.values), f"the layout of {reader.name}")
    except StoreError as exc:
        require_reachable(engine.backend, exc)
        return exc
    return reader


def _extent_problems(packs: Packs, part: Part, record: Record, rank: int, *, read_data: bool) -> Iterator[_PartProblem]:
    """Compares extents with the packs' footers, with the packs' sizes, and with the blocks that were found bad."""
    ids = np.frombuffer(part.ids + part.base_ids, np.uint8).reshape(-1, DIGEST_BYTES)
    for number, pack in enumerate(part.packs):
        rows = np.flatnonzero(part.extents["pack"] == number)
        if not len(rows):
            continue
        name, extents = pack_name(pack), part.extents[rows]
        footer = packs.footer(pack)
        if isinstance(footer, Footer):
            wrong: npt.NDArray[np.bool_] = _not_in_footer(footer, extents, ids[rows])
            kind, message = (
                "corrupt_object",
                f"{name} does not hold what {part_name(record.parts[rank])} refers to: it was replaced or swapped",
            )
            bad = packs.bad.get(pack)
            if bad is not None and not wrong.any():
                kind, message = "corrupt_object", bad.message
                wrong = np.isin(extents["entry"], np.fromiter(bad.entries, np.int64))
        else:
            kind, message = footer
            wrong = _unreachable(packs, pack, extents, ids[rows], read_data=read_data and kind != "missing_object")
        if wrong.any():
            hit = np.zeros(len(part.extents), np.bool_)
            hit[rows[wrong]] = True
            yield _PartProblem(kind, name, message, hit)


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


def _unreachable(packs: Packs, pack: Ulid, extents: Extents, ids: npt.NDArray[np.uint8], *, read_data: bool) -> npt.NDArray[np.bool_]:
    """In a pack without a usable footer: blocks beyond its end, and with `read_data` those whose bytes are wrong."""
    listed = packs.listed.get(pack)
    if listed is None:
        return np.ones(len(extents), np.bool_)
    wrong: npt.NDArray[np.bool_] = extents["offset"] + extents["stored"] > listed.size_bytes
    if read_data:
        for at in np.flatnonzero(~wrong).tolist():
            wrong[at] = not packs.is_intact(pack, extents[at].item(), ids[at].tobytes())
    return wrong


def _bounded(names: Sequence[str]) -> tuple[str, ...]:
    more = len(names) - MAX_NAMED
    return (*names[:MAX_NAMED], *([f"and {more} more"] if more > 0 else []))


def hit_text(addresses: Sequence[str], info: SnapshotInfo, names: Sequence[str]) -> str:
    """``runs/gpt@1000 (root 9f86d081...): tensors``."""
    where = ", ".join(addresses) or "no ref"
    return f"{where} (root {info.root.hex()[:12]}): {', '.join(names) or 'all of it'}"

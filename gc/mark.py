"""Marking by location: what snapshots refer to, as one small number per stored block; never a set of hashes.

Parts are streamed, so memory does not grow with the number of snapshots' blocks: a byte for each entry of each pack that anything
refers to. Knows nothing of refs: what a mark means is the caller's.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.engine import Engine
from tensorstore_ck.envelope import MAX_OBJECT_BYTES
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.ids import DIGEST_BYTES, Ulid
from tensorstore_ck.log import SnapshotInfo
from tensorstore_ck.part import Extents, Part, decode_part, part_name

Numbers = npt.NDArray[Any]


class Placed(NamedTuple):
    """Distinct blocks of one pack: their marks before, and their sizes."""

    before: Numbers
    stored: Numbers
    raw: Numbers


class Marks:
    """A number for each entry of each pack; 0 means unmarked. Not thread-safe."""

    def __init__(self) -> None:
        self.packs: dict[Ulid, Numbers] = {}

    def mark(self, part: Part, change: Callable[[Placed], Numbers]) -> None:
        """Gives the blocks that `part` refers to, delta bases included, the marks that `change` returns, pack by pack."""
        for number, rows in _by_pack(part.extents):
            pack = part.packs[number]
            entries = rows["entry"].astype(np.int64)
            if np.any(entries[1:] <= entries[:-1]):  # else there is none twice
                first = _first_of_each(entries)
                rows, entries = rows[first], entries[first]
            marks = self._grown(pack, int(entries.max()) + 1)
            after = change(Placed(marks[entries], rows["stored"], rows["raw"]))
            kind = np.min_scalar_type(int(after.max()))
            if kind.itemsize > marks.dtype.itemsize:
                marks = self.packs[pack] = marks.astype(kind)
            marks[entries] = after

    def _grown(self, pack: Ulid, count: int) -> Numbers:
        marks = self.packs.get(pack)
        if marks is None or len(marks) < count:
            grown = np.zeros(count if marks is None else max(count, len(marks) * 5 // 4), np.uint8 if marks is None else marks.dtype)
            if marks is not None:
                grown[: len(marks)] = marks
            marks = self.packs[pack] = grown
        return marks




def read_parts(engine: Engine, info: SnapshotInfo) -> Iterator[tuple[Ulid, Part, int]]:
    """(name, part, bytes of the object) of each part of a snapshot, one at a time, past any cache.

    Raises:
        DamageError: the record or a part is missing or damaged.
    """
    record = engine.read_record(info)
    for rank, ulid in enumerate(record.parts):
        name = part_name(ulid)
        data = engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
        part = decode_part(data, name)
        if part.part_id() != record.part_ids[rank * DIGEST_BYTES : (rank + 1) * DIGEST_BYTES] or part.rank != rank:
            raise CorruptObjectError(f"{name} is not the part that its snapshot names; run `tsck fsck`", object_id=name)
        yield ulid, part, len(data)


def _by_pack(extents: Extents) -> Iterator[tuple[int, Extents]]:
    """The rows of each pack."""
    packs = extents["pack"]
    if not len(packs):
        return
    if np.any(packs[1:] < packs[:-1]):
        extents = extents[np.argsort(packs, kind="stable")]
        packs = extents["pack"]
    starts = np.flatnonzero(np.concatenate(([True], packs[1:] != packs[:-1])))
    for start, stop in zip(starts, [*starts[1:], len(packs)], strict=True):
        yield int(packs[start]), extents[start:stop]


def _first_of_each(entries: Numbers) -> Numbers:
    """Positions that hold each distinct entry once; linear, where sorting would cost most of a mark."""
    last = np.zeros(int(entries.max()) + 1, np.int64)
    positions = np.arange(len(entries))
    last[entries] = positions
    return np.flatnonzero(last[entries] == positions)

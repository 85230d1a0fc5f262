"""Marking by location: a bit for each entry of each pack that is referred to; never a set of hashes.

Parts are streamed, or their summaries taken from this host's cache, so memory does not grow with the number of references. All packs
share one array, and a few array operations mark a part. The caller decides what to mark, and follows relocations.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.engine.engine import Engine, decode_named_part
from tensorstore_ck.engine.reachability import Entries
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.pack import MAX_ENTRIES
from tensorstore_ck.format.part import Part, part_name
from tensorstore_ck.format.record import Record
from tensorstore_ck.format.sealed import MAX_OBJECT_BYTES
from tensorstore_ck.gc.part_summary import PartSummary, SummaryCache, entries_of, summarize, words_of
from tensorstore_ck.log import SnapshotRow

Array = npt.NDArray[Any]


class PackArray:
    """One array with a zero-initialized region for each pack, which grows on demand. Not thread-safe."""

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.values: Array = np.zeros(0, dtype)
        self._slots: defaultdict[Ulid, int] = defaultdict(itertools.count().__next__)
        self._regions = np.zeros((0, 2), np.int64)
        """(start, size) by slot."""
        self._end = 0

    @property
    def packs(self) -> Collection[Ulid]:
        """The packs that have a region."""
        return self._slots.keys()

    def starts(self, packs: Sequence[Ulid], sizes: Array) -> Array:
        """The starts of the regions of `packs`, grown to at least `sizes`; valid until the next call."""
        slots = np.fromiter(map(self._slots.__getitem__, packs), np.int64, len(packs))
        missing = len(self._slots) - len(self._regions)
        if missing > 0:
            self._regions = np.concatenate((self._regions, np.zeros((missing + len(self._slots), 2), np.int64)))
        for at in np.flatnonzero(self._regions[slots, 1] < sizes).tolist():
            self._grow(int(slots[at]), int(sizes[at]))
        starts: Array = self._regions[slots, 0]
        return starts

    def region(self, pack: Ulid) -> Array:
        """The region of a pack."""
        if pack not in self._slots:
            return self.values[:0]
        start, size = self._regions[self._slots[pack]].tolist()
        return self.values[start : start + size]

    def copy(self) -> "PackArray":
        """A deep copy."""
        copied = PackArray(self.values.dtype)
        copied.values, copied._regions, copied._end = self.values.copy(), self._regions.copy(), self._end
        copied._slots = defaultdict(itertools.count(len(self._slots)).__next__, self._slots)
        return copied

    def _grow(self, slot: int, size: int) -> None:
        """Moves a pack's region to the end, at least twice as large, so that little space is wasted."""
        start, old_size = self._regions[slot].tolist()
        size = max(size, 2 * old_size)
        if self._end + size > len(self.values):
            grown = np.zeros(max(self._end + size, len(self.values) * 5 // 4), self.values.dtype)
            grown[: self._end] = self.values[: self._end]
            self.values = grown
        self.values[self._end : self._end + old_size] = self.values[start : start + old_size]
        self._regions[slot] = (self._end, size)
        self._end += size


class LiveBits:
    """The needed entries of each pack. Not thread-safe."""

    def __init__(self) -> None:
        self._words = PackArray("<u8")

    @property
    def packs(self) -> Collection[Ulid]:
        """The packs with a needed entry."""
        return self._words.packs

    @property
    def size_bytes(self) -> int:
        """Memory in use."""
        return self._words.values.nbytes

    def copy(self) -> "LiveBits":
        """A deep copy."""
        copied = LiveBits()
        copied._words = self._words.copy()
        return copied

    def mark(self, summary: PartSummary) -> None:
        """Marks the entries that a part refers to."""
        if summary.packs:
            last = summary.words[np.cumsum(summary.counts) - 1]
            starts = self._words.starts(summary.packs, last.astype(np.int64) + 1)
            self._words.values[np.repeat(starts, summary.counts) + summary.words] |= summary.bits

    def mark_entries(self, pack: Ulid, entries: Entries) -> None:
        """Marks sorted entries of one pack."""
        words, bits = words_of(entries.astype(np.int64))
        if len(words):
            start = self._words.starts([pack], words[-1:] + 1)
            self._words.values[start + words] |= bits

    def live_entries(self, pack: Ulid) -> Entries:
        """The needed entries of a pack, in order."""
        bits = self._words.region(pack)
        return entries_of(np.arange(len(bits)), bits)


def read_parts(engine: Engine, info: SnapshotRow) -> Iterator[tuple[Ulid, Part, int]]:
    """(name, part, bytes of the object) of each part of a snapshot, one at a time, past any cache.

    Raises:
        DamageError: the record or a part is missing or damaged.
    """
    record = engine.read_own_record(info)
    for rank, ulid in enumerate(record.parts):
        yield ulid, *_read_part(engine, record, rank)


def read_summaries(engine: Engine, info: SnapshotRow, cache: SummaryCache) -> Iterator[tuple[Ulid, PartSummary]]:
    """(name, summary) of each part of a snapshot, one at a time; reads and summarizes parts that are not cached.

    Raises:
        DamageError: the record, or a part that is not cached, is missing or damaged.
    """
    parts, record = cache.parts_of(info), None
    if parts is None:
        record = engine.read_own_record(info)
        parts = [(ulid, record.part_id(rank)) for rank, ulid in enumerate(record.parts)]
        cache.put_parts(info, parts)
    for rank, (ulid, part_id) in enumerate(parts):
        summary = cache.get(ulid)
        if summary is None or (summary.part_id, summary.rank) != (part_id, rank):
            record = record or engine.read_own_record(info)
            part, size_bytes = _read_part(engine, record, rank)
            summary = summarize(part, part_id)
            del part  # one part at a time in memory
            cache.put(ulid, size_bytes, summary)
        yield ulid, summary


def _read_part(engine: Engine, record: Record, rank: int) -> tuple[Part, int]:
    name = part_name(record.parts[rank])
    data = engine.backend.get(name, max_bytes=MAX_OBJECT_BYTES)
    part = decode_named_part(data, record, rank)
    if len(part.extents) and int(part.extents["entry"].max()) >= MAX_ENTRIES:
        raise CorruptObjectError(f"{name} names an entry that no pack can have; run `tsck fsck`", object_id=name)
    return part, len(data)

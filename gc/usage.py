"""Who uses how many bytes: per ref, and in all. One pass over the parts; no pack is read.

Each stored block is marked with the set of refs that reach it. Sets are numbered as they turn up, and bytes are summed per set, so that
a block costs one byte of memory while there are fewer than 256 of them.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tensorstore_ck.engine import Engine
from tensorstore_ck.gc.mark import Marks, Numbers, Placed, read_parts
from tensorstore_ck.gc.roots import roots
from tensorstore_ck.ids import Ulid
from tensorstore_ck.pack import ENTRY_DTYPE, HEADER, TRAILER
from tensorstore_ck.parallel import for_each
from tensorstore_ck.record import record_name

REMOTE_THREADS: Final = 8


@dataclass(frozen=True, slots=True)
class RefUsage:
    """What one branch, with its whole history, or one tag refers to."""

    ref: str
    snapshots: int
    """Distinct ones."""
    logical_bytes: int
    """Sum of its snapshots, each as large as what was put."""
    unique_bytes: int
    """Raw bytes of the distinct blocks, and of what lies inside parts."""
    stored_bytes: int
    """What these blocks take in packs, and parts and records."""
    shared_bytes: int
    """Of the stored bytes: those that another ref refers to as well."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What all refs together refer to, and what lies in the store."""

    refs: tuple[RefUsage, ...]
    snapshots: int
    logical_bytes: int
    unique_bytes: int
    stored_bytes: int
    shared_bytes: int
    """Of the stored bytes: those that more than one ref refers to."""
    objects_bytes: int
    """Everything in the store, by listing it."""
    unreferenced_bytes: int
    """Bytes in packs, parts and records that no ref refers to, and that are no overhead of what one does."""


def measure_usage(engine: Engine) -> Usage:
    """The usage as of the log entry that was folded last.

    Raises:
        DamageError: a record or part cannot be read; `tsck fsck` tells more.
    """
    view = engine.log.view()
    reached = roots(view)
    sums = _Sums(reached.values())
    lock = threading.Lock()

    def count(ulid: Ulid) -> None:
        info = view.snapshot(ulid)
        if info is None:
            return
        with lock:
            sums.add_snapshot(reached[ulid], info.logical_bytes, engine.backend.size(record_name(ulid)))
        for _, part, part_bytes in read_parts(engine, info):
            with lock:
                sums.add_part(reached[ulid], part_bytes, len(part.inline))
                sums.marks.mark(part, lambda placed: sums.add_blocks(reached[ulid], placed))

    for_each(reached, count, 1 if engine.backend.is_local else REMOTE_THREADS)
    objects_bytes = kept_bytes = 0
    for info in engine.backend.list(""):
        objects_bytes += info.size_bytes
        if info.name.startswith(("packs/", "parts/", "snapshots/")):
            kept_bytes += info.size_bytes
    return sums.usage(objects_bytes, kept_bytes)


class _Sums:
    """Bytes per set of refs; a set is a bit mask, and its number is what blocks are marked with. Number 0: no ref."""

    def __init__(self, ref_lists: Iterable[list[str]]) -> None:
        self.refs = sorted({ref for refs in ref_lists for ref in refs})
        self._bit = {ref: 1 << number for number, ref in enumerate(self.refs)}
        self.marks = Marks()
        self._sets = [0]
        self._number_of = {0: 0}
        self._raw = [0]
        self._stored = [0]
        self._blocks = [0]
        self._logical = [0]
        self._snapshots = [0]

    def add_snapshot(self, refs: list[str], logical_bytes: int, record_bytes: int) -> None:
        """A snapshot and its record."""
        number = self._set_number(refs)
        self._snapshots[number] += 1
        self._logical[number] += logical_bytes
        self._stored[number] += record_bytes

    def add_part(self, refs: list[str], part_bytes: int, inline_bytes: int) -> None:
        """A part, without its blocks."""
        number = self._set_number(refs)
        self._stored[number] += part_bytes
        self._raw[number] += inline_bytes

    def add_blocks(self, refs: list[str], placed: Placed) -> Numbers:
        """Moves blocks to the sets that `refs` joins, and returns these sets' numbers."""
        mask = self._sets[self._set_number(refs)]
        joined = np.zeros(int(placed.before.max()) + 1, np.int64)
        for before in np.flatnonzero(np.bincount(placed.before)).tolist():
            joined[before] = self._number(self._sets[before] | mask)
        after = joined[placed.before]
        moved = after != placed.before
        for numbers, sign in ((placed.before[moved], -1), (after[moved], 1)):
            # float64 holds every integer up to 2**53, which is more than one pack can have
            for sums, weights in ((self._raw, placed.raw[moved]), (self._stored, placed.stored[moved]), (self._blocks, None)):
                counted = np.bincount(numbers, weights)
                for number in np.flatnonzero(counted).tolist():
                    sums[number] += sign * int(counted[number])
        return after

    def usage(self, objects_bytes: int, kept_bytes: int) -> Usage:
        """The result; `kept_bytes` is what all packs, parts and records take."""
        every = self._totals(-1)
        overhead = len(self.marks.packs) * (HEADER.size + TRAILER.size) + ENTRY_DTYPE.itemsize * sum(self._blocks[1:])
        return Usage(
            tuple(RefUsage(ref, **self._totals(bit)) for ref, bit in self._bit.items()),
            **every,
            objects_bytes=objects_bytes,
            unreferenced_bytes=max(0, kept_bytes - every["stored_bytes"] - overhead),
        )

    def _totals(self, refs: int) -> Mapping[str, int]:
        """Sums over the sets that have one of these refs in them."""
        numbers = [number for number, mask in enumerate(self._sets) if mask & refs]
        return {
            "snapshots": sum(self._snapshots[number] for number in numbers),
            "logical_bytes": sum(self._logical[number] for number in numbers),
            "unique_bytes": sum(self._raw[number] for number in numbers),
            "stored_bytes": sum(self._stored[number] for number in numbers),
            "shared_bytes": sum(self._stored[number] for number in numbers if self._sets[number].bit_count() > 1),
        }

    def _set_number(self, refs: list[str]) -> int:
        mask = 0
        for ref in refs:
            mask |= self._bit[ref]
        return self._number(mask)

    def _number(self, mask: int) -> int:
        number = self._number_of.setdefault(mask, len(self._sets))
        if number == len(self._sets):
            self._sets.append(mask)
            for sums in (self._raw, self._stored, self._blocks, self._logical, self._snapshots):
                sums.append(0)
        return number

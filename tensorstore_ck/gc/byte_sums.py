"""Sums of bytes per holder. Pure arithmetic: a holder is a number or a name.

`ByteSums` marks each block with the number of its set of holders, and sums bytes per set; a block costs one byte of memory while there
are fewer than 256 sets. `OwnerBytes` is for many holders: it tracks only which blocks have a single holder. Both count a block once
however often it is added. Not thread-safe.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from operator import add
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.format.part import Extents
from tensorstore_ck.gc.live_bits import PackArray
from tensorstore_ck.gc.part_summary import in_order

Array = npt.NDArray[Any]
SHARED: Final = (1 << 32) - 1


class BlockSet(NamedTuple):
    """Distinct blocks, by pack and entry."""

    packs: list[Ulid]
    counts: Array
    """Number of blocks per pack."""
    entries: Array
    stored: Array
    raw: Array
    codecs: Array

    def positions(self, array: PackArray) -> Array:
        """The positions of these blocks in `array`."""
        last = self.entries[np.cumsum(self.counts) - 1] if self.packs else self.entries
        return np.repeat(array.starts(self.packs, last + 1), self.counts) + self.entries


def distinct_blocks(packs: Sequence[Ulid], extents: Extents) -> BlockSet:
    """The blocks that extents refer to, delta bases included."""
    rows, keys = in_order(extents)
    firsts = np.flatnonzero(np.diff(keys, prepend=-1))
    rows, keys = rows[firsts], keys[firsts]
    numbers = keys >> 32
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    return BlockSet(
        packs=[packs[number] for number in numbers[starts].tolist()],
        counts=np.diff(starts, append=len(keys)),
        entries=keys & (1 << 32) - 1,
        stored=extents["stored"][rows],
        raw=extents["raw"][rows],
        codecs=extents["codec"][rows],
    )


class HolderBytes(NamedTuple):
    """Sums for some holders."""

    snapshots: int
    logical_bytes: int
    unique_bytes: int
    stored_bytes: int


class GroupBytes(NamedTuple):
    """Sums for the holders of one group."""

    held: HolderBytes
    shared_bytes: int
    """The stored bytes that another group holds, too."""
    exclusive_bytes: int
    """The stored bytes that no other holder has."""


class ByteSums:
    """Bytes per set of holders; a set is a bit mask, with a bit for each of `holders`."""

    def __init__(self, holders: Collection[str]) -> None:
        self._bit = {holder: 1 << number for number, holder in enumerate(holders)}
        self._numbers = PackArray(np.uint8)
        self._number_of = {0: 0}
        self._sets = [0]
        self._columns: list[list[int]] = [[0] for _ in HolderBytes._fields]
        self._objects: dict[Hashable, int] = {}
        self.blocks = 0
        """Number of distinct blocks."""
        self.live: dict[Ulid, tuple[int, int]] = {}
        """Pack -> (blocks, stored bytes)."""
        self.codecs: dict[int, tuple[int, int, int]] = {}
        """Codec -> (distinct blocks, raw bytes, stored bytes)."""

    def mask(self, holders: Collection[str]) -> int:
        """The bit mask of some holders."""
        return sum(self._bit[holder] for holder in holders)

    def sums(self, chosen: Callable[[int], bool | int]) -> HolderBytes:
        """Sums over all sets of holders for which `chosen` is true."""
        numbers = [number for number, mask in enumerate(self._sets) if number and chosen(mask)]
        return HolderBytes(*(sum(map(column.__getitem__, numbers)) for column in self._columns))

    def sums_of_groups(self, groups: Mapping[str, str], ignored: int) -> dict[str, GroupBytes]:
        """Sums for each group of holders, in one pass over the sets.

        Args:
            groups: Holder -> its group.
            ignored: The mask of holders beside which a group still counts as the only holder.
        """
        of_bit = [groups.get(holder) for holder in self._bit]
        rows = {group: [0] * (len(self._columns) + 2) for group in groups.values()}
        for mask, *sizes in zip(self._sets, *self._columns, strict=True):
            if not any(sizes):
                continue  # a set whose blocks have got more holders
            found = {of_bit[bit] for bit in _bits(mask & ~ignored)}
            held_by = {group for group in found if group is not None}
            stored = sizes[-1]
            added = (*sizes, stored if len(held_by) > 1 else 0, stored if len(found) == 1 else 0)
            for group in held_by:
                rows[group] = list(map(add, rows[group], added))
        return {group: GroupBytes(HolderBytes(*row[:-2]), *row[-2:]) for group, row in rows.items()}

    def add_snapshot(self, mask: int, logical_bytes: int) -> None:
        """Adds a snapshot; call it once for each."""
        number = self._number(mask)
        self._columns[0][number] += 1
        self._columns[1][number] += logical_bytes

    def add_object(self, mask: int, key: Hashable, stored_bytes: int, raw_bytes: int = 0) -> None:
        """Adds a small object."""
        before = self._objects.get(key, 0)
        after = self._objects[key] = self._number(self._sets[before] | mask)
        for column, size in ((self._columns[2], raw_bytes), (self._columns[3], stored_bytes)):
            column[before] -= size
            column[after] += size

    def add_blocks(self, mask: int, blocks: BlockSet) -> None:
        """Adds the blocks of a part."""
        at = blocks.positions(self._numbers)
        before = self._numbers.values[at]
        joined = np.arange(len(self._sets))
        for number in np.flatnonzero(np.bincount(before)).tolist():
            joined[number] = self._number(self._sets[number] | mask)
        after = joined[before]
        moved = np.flatnonzero(after != before)
        if not len(moved):
            return
        kind = np.min_scalar_type(len(self._sets) - 1)
        if kind.itemsize > self._numbers.values.itemsize:
            self._numbers.values = self._numbers.values.astype(kind)
        self._numbers.values[at[moved]] = after[moved]
        self._count_new(blocks, before == 0)
        for column, weights in ((self._columns[2], blocks.raw[moved]), (self._columns[3], blocks.stored[moved])):
            for numbers, sign in ((before[moved], -1), (after[moved], 1)):
                # float64 holds every integer up to 2**53, which is more than a part can refer to
                counted = np.bincount(numbers, weights)
                for number in np.flatnonzero(counted).tolist():
                    column[number] += sign * int(counted[number])

    def _count_new(self, blocks: BlockSet, is_new: Array) -> None:
        if is_new.any():
            self.blocks += int(is_new.sum())
            starts = np.cumsum(blocks.counts) - blocks.counts
            counts = np.add.reduceat(is_new, starts, dtype=np.int64)
            sizes = np.add.reduceat(np.where(is_new, blocks.stored, 0), starts, dtype=np.int64)
            for number in np.flatnonzero(counts).tolist():
                pack = blocks.packs[number]
                count, size = self.live.get(pack, (0, 0))
                self.live[pack] = (count + int(counts[number]), size + int(sizes[number]))
            for codec in np.flatnonzero(np.bincount(blocks.codecs[is_new])).tolist():
                of_codec = is_new & (blocks.codecs == codec)
                added = int(of_codec.sum()), _total(blocks.raw[of_codec]), _total(blocks.stored[of_codec])
                count, raw, stored = self.codecs.get(codec, (0, 0, 0))
                self.codecs[codec] = (count + added[0], raw + added[1], stored + added[2])

    def _number(self, mask: int) -> int:
        number = self._number_of.setdefault(mask, len(self._sets))
        if number == len(self._sets):
            self._sets.append(mask)
            for column in self._columns:
                column.append(0)
        return number


def _bits(mask: int) -> Iterator[int]:
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def _total(sizes: Array) -> int:
    return int(sizes.sum(dtype=np.int64))


class OwnerBytes:
    """Total and exclusive bytes of many holders, numbered from 0. A block costs four bytes of memory."""

    def __init__(self, holders: int) -> None:
        self._owner = PackArray(np.uint32)
        """Per block: 0 (nobody), `SHARED`, or the holder's number + 1."""
        self._objects: dict[Hashable, int] = {}
        self.stored_bytes = np.zeros(holders, np.int64)
        self.exclusive_bytes = np.zeros(holders, np.int64)

    def add_object(self, holder: int, key: Hashable, stored_bytes: int) -> None:
        """Adds a small object; once per holder."""
        self.stored_bytes[holder] += stored_bytes
        owner = self._objects.get(key, 0)
        if not owner:
            self.exclusive_bytes[holder] += stored_bytes
        elif owner != SHARED:
            self.exclusive_bytes[owner - 1] -= stored_bytes
        self._objects[key] = SHARED if owner else holder + 1

    def add_blocks(self, holder: int, blocks: BlockSet, seen: PackArray) -> None:
        """Adds the blocks of a part; `seen` (bool, one per holder) makes blocks of several parts count once."""
        at = blocks.positions(seen)
        new = np.flatnonzero(~seen.values[at])
        seen.values[at] = True
        self.stored_bytes[holder] += blocks.stored[new].sum(dtype=np.int64)
        at = blocks.positions(self._owner)[new]
        owner, stored = self._owner.values[at], blocks.stored[new]
        self._owner.values[at] = np.where(owner == 0, holder + 1, SHARED)
        self.exclusive_bytes[holder] += stored[owner == 0].sum(dtype=np.int64)
        lost = (owner != 0) & (owner != SHARED)
        if lost.any():
            counted = np.bincount(owner[lost] - 1, stored[lost])
            self.exclusive_bytes[: len(counted)] -= counted.astype(np.int64)

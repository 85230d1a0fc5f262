"""Cached on this host for gc: the entries that a part refers to, as bits per pack; the parts of a snapshot; how many entries a pack has.

A part is immutable and its name is never reused, so its summary stays valid while the part exists. A summary is used only for a listed
part of the same size, and checked against the record like the part itself; a damaged one is ignored. It does not follow relocations.
"""

import contextlib
import threading
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tensorstore_ck.common.ids import DIGEST_BYTES, ULID_BYTES, Digest, Ulid, derived_hash, split_ulids
from tensorstore_ck.engine.reachability import Entries
from tensorstore_ck.errors import CorruptObjectError, UnsupportedValueError
from tensorstore_ck.format.part import Extents, Part
from tensorstore_ck.format.sealed import pack_body, take, take_count, take_digest, unpack_body
from tensorstore_ck.log import ObjectKey, SnapshotRow
from tensorstore_ck.log.cache import Table, write_rows

PREFIX: Final = b"s/"
PARTS_PREFIX: Final = b"k/"
WORD_BITS: Final = 64
MAX_PENDING_BYTES: Final = 4 << 20
"""Bytes of summaries that are written in one batch: every batch is synced to disk."""

Array = npt.NDArray[Any]


PartNames = Sequence[tuple[Ulid, Digest]]
"""The parts of a snapshot and their ids, by rank."""


class PartSummary(NamedTuple):
    """The entries that a part refers to, delta bases included: the nonempty words of 64 entries each."""

    part_id: Digest
    rank: int
    packs: list[Ulid]
    """The packs that the part refers to."""
    counts: Array
    """Number of words per pack."""
    words: Array
    """The number of each word in its pack, in order."""
    bits: Array
    """Bit i of word w: entry 64 w + i."""

    def entries(self, packs: Container[Ulid]) -> dict[Ulid, Entries]:
        """The entries in those of the given `packs` that the part refers to, in order."""
        ends = np.cumsum(self.counts).tolist()
        chosen = ((pack, slice(start, end)) for pack, start, end in zip(self.packs, [0, *ends], ends, strict=False) if pack in packs)
        return {pack: entries_of(self.words[words], self.bits[words]) for pack, words in chosen}

    def without(self, packs: Container[Ulid]) -> "PartSummary":
        """The summary without some packs."""
        kept = np.array([pack not in packs for pack in self.packs], bool)
        chosen = np.repeat(kept, self.counts)
        names = [pack for pack, keep in zip(self.packs, kept.tolist(), strict=True) if keep]
        return self._replace(packs=names, counts=self.counts[kept], words=self.words[chosen], bits=self.bits[chosen])


def summarize(part: Part, part_id: Digest) -> PartSummary:
    """The summary of a part; the caller has computed its id."""
    _, keys = in_order(part.extents)
    words, bits = words_of(keys)
    owners = words >> 26  # 32 bits less the 6 that a word takes
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    packs = [part.packs[number] for number in owners[firsts].tolist()]
    counts = np.diff(firsts, append=len(words)).astype("<u4")
    return PartSummary(part_id=part_id, rank=part.rank, packs=packs, counts=counts, words=(words & (1 << 26) - 1).astype("<u4"), bits=bits)


def in_order(extents: Extents) -> tuple[Array, Array]:
    """Rows by pack and entry, and (pack << 32 | entry) of each."""
    packs = extents["pack"]
    # Writers fill several packs at once, each in order. numpy sorts 16-bit keys by radix, which leaves little to do.
    rows = np.argsort(packs.astype(np.uint16) if len(packs) and int(packs.max()) < 1 << 16 else packs, kind="stable")
    keys = (packs.astype(np.int64) << 32 | extents["entry"])[rows]
    if np.any(keys[1:] < keys[:-1]):
        finer = np.argsort(keys, kind="stable")
        rows, keys = rows[finer], keys[finer]
    return rows, keys


def words_of(keys: Array) -> tuple[Array, Array]:
    """(word numbers, bits) of sorted numbers with duplicates."""
    words = keys >> 6
    firsts = np.flatnonzero(np.diff(words, prepend=-1))
    if not len(firsts):
        return words, np.empty(0, "<u8")
    bits = np.left_shift(np.uint64(1), (keys & WORD_BITS - 1).astype(np.uint64))
    return words[firsts], np.bitwise_or.reduceat(bits, firsts).astype("<u8", copy=False)


def entries_of(words: Array, bits: Array) -> Entries:
    """The numbers of the set bits, in order: the inverse of `words_of`."""
    positions = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
    return words[positions // WORD_BITS].astype(np.int64) * WORD_BITS + positions % WORD_BITS


class SummaryCache:
    """Summaries in the host's table. Thread-safe."""

    def __init__(self, table: Table, listed: Mapping[Ulid, int] | None) -> None:
        """`listed`: the parts in the backend and their sizes; other parts have no summary. None: the backend was not listed."""
        self._table = table
        self._listed = listed
        self._lock = threading.Lock()
        self._pending: dict[bytes, bytes] = {}
        self._pending_bytes = 0

    def get(self, part: Ulid) -> PartSummary | None:
        """The summary of a listed part, if it is cached."""
        size_bytes = None if self._listed is None else self._listed.get(part)
        if size_bytes is None and self._listed is not None:
            return None
        value = self._table.get(PREFIX + part)
        return None if value is None else decode_summary(value, part, size_bytes)

    def put(self, part: Ulid, size_bytes: int, summary: PartSummary) -> None:
        """Keeps a summary; it is in the table after `flush`, or when a batch is full."""
        with contextlib.suppress(UnsupportedValueError):  # too large to keep
            self._put(PREFIX + part, encode_summary(summary, part, size_bytes))

    def parts_of(self, info: SnapshotRow) -> PartNames | None:
        """The cached parts of a snapshot; None without them, and if the backend was listed: then the record is read."""
        value = self._table.get(PARTS_PREFIX + info.ulid) if self._listed is None else None
        return None if value is None else decode_parts(value, info)

    def put_parts(self, info: SnapshotRow, parts: PartNames) -> None:
        """Keeps the parts of a snapshot, as `put` does."""
        if self._listed is None:
            self._put(PARTS_PREFIX + info.ulid, encode_parts(parts, info))

    def flush(self) -> None:
        """Writes pending summaries."""
        with self._lock:
            self._write()

    def prune(self) -> int:
        """Drops the summaries of unlisted parts; returns their number."""
        listed = self._listed or {}
        gone = [key for key, _ in self._table.scan(PREFIX) if key[len(PREFIX) :] not in listed]
        without_parts = [key for key, value in self._table.scan(PARTS_PREFIX) if any(part not in listed for part, _ in _names(value))]
        self._delete([*gone, *without_parts])
        return len(gone)

    def drop(self, keys: Iterable[ObjectKey]) -> None:
        """Drops the cached data of deleted parts and snapshots."""
        prefixes = {"part": PREFIX, "snapshot": PARTS_PREFIX}
        self._delete([prefixes[key.kind] + key.ulid for key in keys if key.kind in prefixes])

    def _put(self, key: bytes, value: bytes) -> None:
        with self._lock:
            self._pending[key] = value
            self._pending_bytes += len(value)
            if self._pending_bytes >= MAX_PENDING_BYTES:
                self._write()

    def _delete(self, keys: Iterable[bytes]) -> None:
        write_rows(self._table, dict.fromkeys(keys))

    def _write(self) -> None:
        if self._pending:
            write_rows(self._table, self._pending)
        self._pending, self._pending_bytes = {}, 0


def encode_summary(summary: PartSummary, part: Ulid, size_bytes: int) -> bytes:
    """The row of a summary: a hash over the part's name and the body, and the body. A changed encoding needs another hash domain."""
    body = pack_body(
        {
            "size": size_bytes,
            "part_id": summary.part_id,
            "rank": summary.rank,
            "packs": b"".join(summary.packs),
            "counts": summary.counts.tobytes(),
            "words": summary.words.tobytes(),
            "bits": summary.bits.tobytes(),
        }
    )
    return derived_hash("part summary", part, body) + body


def decode_summary(value: bytes, part: Ulid, size_bytes: int | None) -> PartSummary | None:
    """The summary in a row; None if it is damaged, of another part, or of another size than `size_bytes` (None: any)."""
    body = memoryview(value)[DIGEST_BYTES:]
    if derived_hash("part summary", part, body) != value[:DIGEST_BYTES]:
        return None
    try:
        fields = unpack_body(body, "a summary")
        packs = take(fields, "packs", bytes)
        summary = PartSummary(
            part_id=take_digest(fields, "part_id"),
            rank=take_count(fields, "rank"),
            packs=split_ulids(packs),
            counts=np.frombuffer(take(fields, "counts", bytes), "<u4"),
            words=np.frombuffer(take(fields, "words", bytes), "<u4"),
            bits=np.frombuffer(take(fields, "bits", bytes), "<u8"),
        )
        noted_bytes = take_count(fields, "size")
        return summary if size_bytes in (None, noted_bytes) else None
    except (CorruptObjectError, TypeError, ValueError):
        return None  # written by another build


def encode_parts(parts: PartNames, info: SnapshotRow) -> bytes:
    """The row of a snapshot's parts: a hash over the snapshot's name, its root and the body, and the body."""
    body = b"".join(ulid + part_id for ulid, part_id in parts)
    return derived_hash("snapshot parts", info.ulid + info.root, body) + body


def decode_parts(value: bytes, info: SnapshotRow) -> PartNames | None:
    """The parts in a row; None if it is damaged or of another snapshot."""
    body = value[DIGEST_BYTES:]
    if len(body) % (ULID_BYTES + DIGEST_BYTES) or derived_hash("snapshot parts", info.ulid + info.root, body) != value[:DIGEST_BYTES]:
        return None
    return _names(value)


def _names(value: bytes) -> PartNames:
    rows = range(DIGEST_BYTES, len(value), ULID_BYTES + DIGEST_BYTES)
    return [(Ulid(value[at : at + ULID_BYTES]), Digest(value[at + ULID_BYTES :][:DIGEST_BYTES])) for at in rows]


_COUNT_PREFIX: Final = b"e/"
_COUNT_BYTES: Final = 4


class PackCounts:
    """Pack -> number of entries, for the listed packs, so that gc need not read the footers of fully needed packs again.

    Packs never change. A lost or wrong count affects only which packs gc looks at. `note` and `get` are thread-safe.
    """

    def __init__(self, table: Table, packs: Collection[Ulid]) -> None:
        self._table = table
        self._counts: dict[Ulid, int] = {}
        self._new: dict[Ulid, int] = {}
        self._gone: list[Ulid] = []
        for key, value in table.scan(_COUNT_PREFIX):
            pack = Ulid(key[len(_COUNT_PREFIX) :])
            if pack in packs:
                self._counts[pack] = int.from_bytes(value, "big")
            else:
                self._gone.append(pack)

    def get(self, pack: Ulid) -> int | None:
        """Number of entries, if this host has read the pack's footer."""
        return self._counts.get(pack)

    def note(self, pack: Ulid, entries: int) -> None:
        """Keeps a count; `flush` writes it to the table."""
        self._counts[pack] = self._new[pack] = entries

    def flush(self) -> None:
        """Writes new counts, and drops those of packs that are gone."""
        if self._new or self._gone:
            new = {_COUNT_PREFIX + pack: count.to_bytes(_COUNT_BYTES, "big") for pack, count in self._new.items()}
            write_rows(self._table, {**new, **{_COUNT_PREFIX + pack: None for pack in self._gone}})
        self._new, self._gone = {}, []

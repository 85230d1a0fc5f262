"""Summaries against sets of (pack, entry), and a cache of them that is believed only as far as it may be."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.common.ids import ZERO_DIGEST, Digest, Ulid
from tensorstore_ck.format.pack import MAX_ENTRIES
from tensorstore_ck.gc.part_summary import (
    PREFIX,
    PartSummary,
    SummaryCache,
    decode_parts,
    decode_summary,
    encode_parts,
    encode_summary,
    summarize,
)
from tensorstore_ck.log import ObjectKey, SnapshotRow
from tensorstore_ck.log.cache import MemoryTable, Table, open_table
from tests.gc.made import Place, make_part, pack_ulid

entries = st.integers(0, 130) | st.integers(0, MAX_ENTRIES - 1)
places = st.lists(st.tuples(st.integers(0, 3) | st.integers(0, 1000), entries), max_size=60)
PART = Ulid(b"a part's name.16")
OTHER = Ulid(b"another name..16")


def summary_of(places: list[Place]) -> PartSummary:
    part = make_part(places)
    return summarize(part, part.part_id())


def content(summary: PartSummary) -> set[Place]:
    found = summary.entries([pack_ulid(pack) for pack in range(1001)])
    assert list(found) == summary.packs
    return {(pack, entry) for pack in range(1001) for entry in found.get(pack_ulid(pack), np.zeros(0)).tolist()}


def same(one: PartSummary, two: PartSummary | None) -> bool:
    return two is not None and encode_summary(one, PART, 0) == encode_summary(two, PART, 0)


@given(places)
def test_a_summary_has_each_extent_once_and_only_packs_in_use(places: list[Place]) -> None:
    summary = summary_of(places)
    assert content(summary) == set(places)
    assert set(summary.packs) == {pack_ulid(pack) for pack, _ in places}
    assert all(sorted(set(found.tolist())) == found.tolist() for found in summary.entries(summary.packs).values())


@given(places, st.sets(st.integers(0, 3)))
def test_less_some_packs(places: list[Place], packs: set[int]) -> None:
    left = summary_of(places).without({pack_ulid(pack) for pack in packs})
    assert content(left) == {place for place in places if place[0] not in packs}


@given(places, st.integers(0, 1 << 40))
def test_a_row_returns_what_was_written(places: list[Place], size: int) -> None:
    summary = summary_of(places)
    row = encode_summary(summary, PART, size)
    found = decode_summary(row, PART, size)
    assert same(summary, found)
    assert found is not None
    assert (found.part_id, found.rank) == (summary.part_id, 0)
    assert decode_summary(row, OTHER, size) is None
    assert decode_summary(row, PART, size + 1) is None


@given(places, st.data())
def test_a_damaged_row_is_none(places: list[Place], data: st.DataObject) -> None:
    row = bytearray(encode_summary(summary_of(places), PART, 5))
    row[data.draw(st.integers(0, len(row) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_summary(bytes(row), PART, 5) is None
    assert decode_summary(bytes(row[: data.draw(st.integers(0, len(row)))]), PART, 5) is None


def test_a_contiguous_part_takes_little() -> None:
    row = encode_summary(summary_of([(0, entry) for entry in range(10_000)]), PART, 0)
    assert len(row) < 10_000 // 64 * 12 + 400


@pytest.fixture(params=["memory", "lmdb"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Table:
    return MemoryTable() if request.param == "memory" else open_table(tmp_path, "t")


def test_a_cache_keeps_what_is_listed(table: Table) -> None:
    one, two = summary_of([(0, 1)]), summary_of([(1, 2), (2, 3)])
    cache = SummaryCache(table, {PART: 10})
    cache.put(PART, 10, one)
    cache.put(OTHER, 20, two)
    cache.flush()
    assert same(one, cache.get(PART))
    assert cache.get(OTHER) is None  # not listed
    assert same(two, SummaryCache(table, {OTHER: 20}).get(OTHER))
    assert SummaryCache(table, {PART: 11}).get(PART) is None
    table.close()


def test_large_ones_are_written_before_the_flush(table: Table) -> None:
    large = summary_of([(0, entry) for entry in range(0, 800_000, 64)])
    cache = SummaryCache(table, {PART: 1})
    for number in range(40):
        cache.put(Ulid(number.to_bytes(16, "big")), 1, large)
    assert sum(1 for _ in table.scan(PREFIX)) > 20
    table.close()


def test_prune_drops_those_of_parts_that_are_gone(table: Table) -> None:
    with table.batch() as batch:
        batch.put(b"r/kept", b"row of another")
    cache = SummaryCache(table, {PART: 1, OTHER: 1})
    for part in (PART, OTHER):
        cache.put(part, 1, summary_of([(0, 1)]))
    cache.flush()
    assert cache.prune() == 0
    assert SummaryCache(table, {OTHER: 1}).prune() == 1
    assert cache.get(PART) is None
    assert cache.get(OTHER) is not None
    assert table.get(b"r/kept") is not None
    table.close()


def snapshot(root: bytes = b"root".ljust(32)) -> SnapshotRow:
    return SnapshotRow(Ulid(b"a snapshot....16"), Digest(root), ZERO_DIGEST, None, "job", 1, 0, 0, {}, 0, 0)


NAMES = [(PART, Digest(b"one".ljust(32))), (OTHER, Digest(b"two".ljust(32)))]


def test_parts_of_a_snapshot_are_cached_where_nothing_is_listed(table: Table) -> None:
    cache = SummaryCache(table, None)
    cache.put_parts(snapshot(), NAMES)
    cache.put(PART, 10, summary_of([(0, 1)]))
    cache.flush()
    assert cache.parts_of(snapshot()) == NAMES
    assert cache.parts_of(snapshot(b"another".ljust(32))) is None
    assert cache.get(PART) is not None
    assert SummaryCache(table, {PART: 10, OTHER: 10}).parts_of(snapshot()) is None  # gc reads each record
    cache.drop([ObjectKey("part", PART), ObjectKey("snapshot", snapshot().ulid), ObjectKey("pack", PART)])
    assert cache.parts_of(snapshot()) is None
    assert cache.get(PART) is None
    table.close()


def test_prune_drops_snapshots_whose_parts_are_gone(table: Table) -> None:
    cache = SummaryCache(table, None)
    cache.put_parts(snapshot(), NAMES)
    cache.flush()
    SummaryCache(table, {PART: 1, OTHER: 1}).prune()
    assert cache.parts_of(snapshot()) == NAMES
    SummaryCache(table, {PART: 1}).prune()
    assert cache.parts_of(snapshot()) is None
    table.close()


@given(st.data())
def test_a_damaged_row_of_parts_is_none(data: st.DataObject) -> None:
    row = bytearray(encode_parts(NAMES, snapshot()))
    row[data.draw(st.integers(0, len(row) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_parts(bytes(row), snapshot()) is None
    assert decode_parts(bytes(row[: data.draw(st.integers(0, len(row)))]), snapshot()) is None

"""Marks against sets of (pack, entry); and that a second look at the same snapshots reads no part."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorstore_ck.common.ids import Ulid
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError
from tensorstore_ck.format.pack import MAX_ENTRIES
from tensorstore_ck.format.part import part_name
from tensorstore_ck.gc.live_bits import LiveBits, read_parts, read_summaries
from tensorstore_ck.gc.part_summary import PREFIX, SummaryCache, summarize
from tests.gc.made import Counting, Made, Place, make_part, open_engine, pack_ulid, publish

places = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 70) | st.integers(0, 5000)), max_size=40)
PLACES: list[list[Place]] = [[(0, 0), (1, 65), (0, 64)], [(1, 2), (1, 65), (2, 7)]]


@given(st.lists(places), st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(0, 9000)))))
def test_marks_are_the_union(parts: list[list[Place]], moved: list[tuple[int, set[int]]]) -> None:
    marks, expected = LiveBits(), set[Place]()
    for part in map(make_part, parts):
        marks.mark(summarize(part, part.part_id()))
    for pack, entries in moved:
        marks.mark_entries(pack_ulid(pack), np.array(sorted(entries), np.int64))
    expected = {place for places in parts for place in places} | {(pack, entry) for pack, entries in moved for entry in entries}
    for pack in range(7):
        assert marks.live_entries(pack_ulid(pack)).tolist() == sorted(entry for other, entry in expected if other == pack)
        assert (pack_ulid(pack) in marks.packs) == any(other == pack for other, _ in expected)


def test_memory_is_a_bit_for_each_entry_however_often_it_is_marked() -> None:
    marks = LiveBits()
    for first in range(20):
        part = make_part([(pack, entry) for pack in range(first % 10, 20) for entry in range(1000)])
        marks.mark(summarize(part, part.part_id()))
    assert marks.size_bytes < 20_000 / 8 * 1.5


def make() -> tuple[Counting, Made]:
    backend = Counting()
    engine = open_engine(backend)
    parts = [make_part(places, rank=rank, ranks=2, bases=rank) for rank, places in enumerate(PLACES)]
    return backend, publish(engine, "runs/a", 1, parts)


def listed(backend: Counting, made: Made) -> dict[Ulid, int]:
    return {part: backend.size(part_name(part)) for part in made.parts}


def test_the_second_time_no_part_is_read() -> None:
    backend, made = make()
    engine = open_engine(backend)
    for expected in (2, 2, 2):
        cache = SummaryCache(engine.table, listed(backend, made))
        marks = LiveBits()
        for _, summary in read_summaries(engine, made.info, cache):
            marks.mark(summary)
        cache.flush()
        assert backend.parts_read == expected
        assert marks.live_entries(pack_ulid(1)).tolist() == [2, 65]
    assert [part for part, _ in read_summaries(engine, made.info, cache)] == made.parts


def test_what_is_not_listed_or_has_another_size_is_read() -> None:
    backend, made = make()
    engine = open_engine(backend)
    cache = SummaryCache(engine.table, listed(backend, made))
    list(read_summaries(engine, made.info, cache))
    cache.flush()
    backend.parts_read = 0
    list(read_summaries(engine, made.info, SummaryCache(engine.table, {})))
    assert backend.parts_read == 2
    sizes = listed(backend, made)
    sizes[made.parts[1]] += 1
    list(read_summaries(engine, made.info, SummaryCache(engine.table, sizes)))
    assert backend.parts_read == 3


def test_a_damaged_summary_is_made_again() -> None:
    backend, made = make()
    engine = open_engine(backend)
    cache = SummaryCache(engine.table, listed(backend, made))
    list(read_summaries(engine, made.info, cache))
    cache.flush()
    key, good = next(engine.table.scan(PREFIX))
    with engine.table.batch() as batch:
        batch.put(key, good[:-1] + bytes([good[-1] ^ 1]))
    backend.parts_read = 0
    list(read_summaries(engine, made.info, cache))
    assert backend.parts_read == 1
    cache.flush()
    assert engine.table.get(key) == good


def test_a_summary_that_is_not_of_the_record_s_part_is_not_used() -> None:
    """As when objects were exchanged in the backend after they were summarised under each other's names."""
    backend, made = make()
    engine = open_engine(backend)
    cache = SummaryCache(engine.table, listed(backend, made))
    parts = {rank: part for rank, (_, part, _) in enumerate(read_parts(engine, made.info))}
    for rank, ulid in enumerate(made.parts):
        wrong = parts[1 - rank]
        cache.put(ulid, listed(backend, made)[ulid], summarize(wrong, wrong.part_id()))
    cache.flush()
    backend.parts_read = 0
    summaries = [summary for _, summary in read_summaries(engine, made.info, cache)]
    assert backend.parts_read == 2
    assert [summary.part_id for summary in summaries] == [parts[0].part_id(), parts[1].part_id()]


def test_a_missing_part_is_missing_unless_its_summary_may_be_used() -> None:
    backend, made = make()
    engine = open_engine(backend)
    backend.delete([part_name(made.parts[1])])
    with pytest.raises(MissingObjectError):
        list(read_summaries(engine, made.info, SummaryCache(engine.table, {})))


def test_exchanged_parts_are_refused() -> None:
    backend, made = make()
    first, second = (backend.get(part_name(part), max_bytes=1 << 20) for part in made.parts)
    for part, data in zip(made.parts, (second, first), strict=True):
        backend.replace(part_name(part), data)
    engine = open_engine(backend)
    with pytest.raises(CorruptObjectError, match="not the part that its snapshot names"):
        list(read_summaries(engine, made.info, SummaryCache(engine.table, {})))


def test_an_entry_that_no_pack_can_have_is_refused() -> None:
    backend = Counting()
    made = publish(open_engine(backend), "runs/a", 1, [make_part([(0, MAX_ENTRIES)])])
    with pytest.raises(CorruptObjectError, match="no pack can have"):
        list(read_parts(open_engine(backend), made.info))

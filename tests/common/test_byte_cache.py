"""The cache that is bounded by bytes."""

from tensorstore_ck.common.byte_cache import ByteCache


def test_it_drops_the_oldest_counts_each_object_once_and_keeps_one_that_is_larger_than_the_limit() -> None:
    cache = ByteCache[int, bytes](lambda: 10, len)
    for _ in range(5):
        cache.put(1, bytes(4))
    cache.put(2, bytes(6))
    assert [cache.get(key) for key in (1, 2)] == [bytes(4), bytes(6)]
    cache.put(3, bytes(1))
    assert [cache.get(key) for key in (1, 2, 3)] == [None, bytes(6), bytes(1)]
    cache.put(4, bytes(11))
    assert [cache.get(key) for key in (2, 3, 4)] == [None, None, bytes(11)]


def test_what_is_offered_drops_nothing_and_what_is_taken_makes_space() -> None:
    cache = ByteCache[int, bytes](lambda: 10, len)
    cache.offer(1, bytes(6))
    cache.offer(1, bytes(6))
    cache.offer(2, bytes(5))
    assert [cache.get(key) for key in (1, 2)] == [bytes(6), None]
    assert [cache.take(1), cache.take(1)] == [bytes(6), None]
    cache.offer(2, bytes(10))
    assert cache.get(2) == bytes(10)


def test_the_limit_follows_the_memory_that_is_free_at_the_end_of_a_turn() -> None:
    cache = ByteCache[int, bytes](lambda: 10, len)
    cache.offer(1, bytes(10))
    cache.offer(2, bytes(10))
    assert cache.get(2) is None
    cache.end_turn(free_bytes=70, share=1 / 4)
    cache.offer(2, bytes(10))
    assert [cache.get(key) for key in (1, 2)] == [bytes(10), bytes(10)]
    cache.end_turn(free_bytes=20, share=1 / 4)
    assert [cache.get(key) for key in (1, 2)] == [None, bytes(10)]
    cache.offer(3, bytes(1))
    assert cache.get(3) is None

"""Decoded objects in memory, up to a number of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """Keeps what was put last, and at least one object. Thread-safe."""

    def __init__(self, max_bytes: Callable[[], int], size_bytes: Callable[[V], int]) -> None:
        """`max_bytes` is asked when the first object comes, and `end_turn` sets the limit again. `size_bytes` returns about how much memory
        an object takes.
        """
        self._find_max_bytes = max_bytes
        self._size_bytes = size_bytes
        self._kept: OrderedDict[K, V] = OrderedDict()
        self._kept_bytes = 0
        self._turn = 0
        self._turns: dict[K, int] = {}
        """In which turn each was offered."""
        self._lock = threading.Lock()

    @cached_property
    def _max_bytes(self) -> int:
        return self._find_max_bytes()

    def get(self, key: K) -> V | None:
        """The object, if it is kept."""
        with self._lock:
            return self._kept.get(key)

    def offer(self, key: K, value: V) -> None:
        """Keeps an object if it fits, and drops none of this turn or the last one for it: of more than fit, used in turns, some are found.

        What was offered earlier goes first. It stays only while there is room: several users take turns.
        """
        with self._lock:
            size_bytes = self._size_bytes(value)
            if key not in self._kept:
                if self._kept_bytes + size_bytes > self._max_bytes:
                    self._drop_unused()
                if self._kept_bytes + size_bytes <= self._max_bytes:
                    self._kept[key] = value
                    self._kept_bytes += size_bytes
                    self._turns[key] = self._turn

    def take(self, key: K) -> V | None:
        """The object, if it is kept, which then is the caller's: it may change."""
        with self._lock:
            value = self._kept.pop(key, None)
            if value is not None:
                self._kept_bytes -= self._size_bytes(value)
                self._turns.pop(key, None)
            return value

    def end_turn(self, free_bytes: int, share: float) -> None:
        """Ends a turn of takes and offers. From now on the limit is a `share` of what would be free without the kept objects."""
        with self._lock:
            self._turn += 1
            self._max_bytes = int(share * (free_bytes + self._kept_bytes))
            self._drop_oldest(self._max_bytes, least=0)

    def put(self, key: K, value: V) -> None:
        """Keeps an object, and drops the oldest ones that exceed the limit. Objects never change, so one that is kept stays."""
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = value
            self._kept_bytes += self._size_bytes(value)
            self._drop_oldest(self._max_bytes, least=1)

    def _drop_oldest(self, max_bytes: float, least: int) -> None:
        """Under the lock, as the next ones. Functions of their own: see common/waiting.py."""
        while self._kept_bytes > max_bytes and len(self._kept) > least:
            self._drop_first()

    def _drop_unused(self) -> None:
        """Drops what was offered before the last turn. Offers come in order, so the oldest are the first."""
        while self._kept and self._turns.get(next(iter(self._kept)), self._turn) < self._turn - 1:
            self._drop_first()

    def _drop_first(self) -> None:
        key, value = self._kept.popitem(last=False)
        self._kept_bytes -= self._size_bytes(value)
        self._turns.pop(key, None)

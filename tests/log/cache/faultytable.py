"""A table on disk that fails: at one call or from one on, damaged or locked by another process."""

from collections.abc import Iterator
from contextlib import contextmanager

from tensorstore_ck.log.cache import Batch, MemoryTable, TableBusyError, TableDamagedError
from tensorstore_ck.log.cache.protocol import Item


class CacheFaults:
    """Counts the calls into all caches of a host; those in `failing` fail."""

    def __init__(self) -> None:
        self.calls = 0
        self.failing = range(0)
        self.is_busy = False
        """Whether they fail like caches whose lock another process holds: reads work."""

    def reset(self, failing: range, *, is_busy: bool) -> None:
        self.calls, self.failing, self.is_busy = 0, failing, is_busy

    def call(self, *, is_batch: bool) -> None:
        if self.is_busy and not is_batch:
            return
        self.calls += 1
        if self.calls - 1 in self.failing:
            error = TableBusyError if self.is_busy else TableDamagedError
            raise error("the test's fault", object_id="cache")


class FaultyTable(MemoryTable):
    """The cache of one store, which all handles of the test share."""

    def __init__(self, faults: CacheFaults) -> None:
        super().__init__()
        self._faults = faults

    def view(self, prefix: bytes) -> "FaultyTable":
        self._faults.call(is_batch=False)
        view = FaultyTable(self._faults)
        self.share_rows(view)
        return view

    def get(self, key: bytes) -> bytes | None:
        self._faults.call(is_batch=False)
        return super().get(key)

    def scan(self, prefix: bytes, *, start: bytes | None = None, reverse: bool = False) -> Iterator[Item]:
        for item in super().scan(prefix, start=start, reverse=reverse):
            self._faults.call(is_batch=False)
            yield item

    @contextmanager
    def batch(self, *, wait: bool = True) -> Iterator[Batch]:
        self._faults.call(is_batch=True)
        with super().batch(wait=wait) as batch:
            yield batch
            if not self._faults.is_busy:
                self._faults.call(is_batch=True)

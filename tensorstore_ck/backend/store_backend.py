"""The backend of an open store: reads packs where they lie, limits the rates of reads and writes, and stops before the disk is full.

The limits are for bulk reads and writes in the background of a training. Uploads from a staging disk are limited in
`backend.staging.upload_pass` instead. All objects, ranges and appends are limited, so the log, for which nobody should wait, uses the
backend itself. `create`, `replace`, listings and deletions are never delayed. Large ranges pass in slices. Free space is checked once per
`CHECK_BYTES` written, for all objects together, and more often when there is less of it.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from tensorstore_ck.backend.cold.cold_locations import ColdLocations
from tensorstore_ck.backend.forwarding import ForwardingBackend
from tensorstore_ck.backend.protocol import Backend, ObjectInfo, ObjectWriter
from tensorstore_ck.common.buffers import Buffer, byte_views
from tensorstore_ck.common.free_space import MinFree, require_free_space
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.errors import MissingObjectError

T = TypeVar("T")

CHECK_BYTES: Final = 64 << 20

Sleep = Callable[[float], object]


def throttled(
    backend: Backend,
    *,
    writes: RateLimit | None = None,
    reads: RateLimit | None = None,
    min_free: MinFree | None = None,
    sleep: Sleep = time.sleep,
) -> Backend:
    """`backend` with these limits; `backend` itself without any. Several backends may share a `RateLimit`."""
    if writes is None and reads is None and min_free is None:
        return backend
    return StoreBackend(backend, writes=writes, reads=reads, min_free=min_free, sleep=sleep)


def throttled_to(backend: Backend, rate: float | str | None) -> Backend:
    """`backend` with this limit for reads, and the same for writes; None: no limit.

    Raises:
        InvalidOptionError: not a rate.
    """
    if rate is None:
        return backend
    return throttled(backend, writes=RateLimit(rate), reads=RateLimit(rate))


def without_min_free(backend: Backend) -> Backend:
    """The same backend for operations that free space: they may use the space that saves leave free."""
    if not isinstance(backend, StoreBackend) or backend._min_free is None:
        return backend
    return StoreBackend(backend.inner, cold=backend._cold, writes=backend._writes, reads=backend._reads, sleep=backend._sleep)


class StoreBackend(ForwardingBackend):
    """The store's own backend, `inner`, with the limits of this handle (see `throttled`); reads each pack where it lies."""

    def __init__(
        self,
        inner: Backend,
        *,
        cold: ColdLocations | None = None,
        writes: RateLimit | None = None,
        reads: RateLimit | None = None,
        min_free: MinFree | None = None,
        sleep: Sleep = time.sleep,
    ) -> None:
        """`cold`: where packs lie that were moved; None: all are here."""
        super().__init__(inner)
        self._cold = cold
        self._writes = writes
        self._reads = reads
        self._min_free = min_free
        self._sleep = sleep
        self._lock = threading.Lock()
        self._unchecked_bytes = 0
        """The bytes that may still be written before the next check."""

    def __reduce__(self) -> tuple[Any, ...]:
        """For workers in other processes: they check the free space themselves, and cannot share a rate limit with this process."""
        return partial(StoreBackend, cold=self._cold, min_free=self._min_free), (self.inner,)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        data = self._read(name, lambda backend: backend.get(name, max_bytes=max_bytes))
        self._wait(self._reads, len(data))  # the size is not known before
        return data

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        limit, done = self._reads, 0
        while limit is not None and limit.rate < math.inf and (size := min(limit.burst_bytes, len(target) - done)):
            self._wait(limit, size)
            self._read_into(name, offset + done, target[done : done + size])
            done += size
        if done < len(target) or not done:
            self._read_into(name, offset + done, target[done:])

    def size(self, name: str) -> int:
        return self._read(name, lambda backend: backend.size(name))

    def put(self, name: str, data: Buffer) -> None:
        self._admit_write(name, len(data))
        self.inner.put(name, data)

    def open_writer(self, name: str) -> ObjectWriter:
        return _ThrottledWriter(self, name, self.inner.open_writer(name))

    def open_whole_writer(self, name: str) -> ObjectWriter:
        return _ThrottledWriter(self, name, self.inner.open_whole_writer(name))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return self.inner.list(prefix) if self._cold is None else self._cold.list(prefix)

    def delete(self, names: Iterable[str]) -> None:
        (self._cold or self.inner).delete(names)

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        return (self._cold or self.inner).list_uploads(folders)

    def abort_upload(self, name: str) -> None:
        (self._cold or self.inner).abort_upload(name)

    def close(self) -> None:
        (self._cold or self.inner).close()

    def _read_into(self, name: str, offset: int, target: memoryview) -> None:
        self._read(name, lambda backend: backend.read_into(name, offset, target))

    def _read(self, name: str, read: Callable[[Backend], T]) -> T:
        cold = self._cold
        if cold is None:
            return read(self.inner)
        url = cold.known_location(name) if cold.known else None
        if url is None:
            try:
                return read(self.inner)  # most packs are there, and then no view of the log is needed
            except MissingObjectError:
                url = cold.location_of(name)
                if url is None:
                    raise
        return cold.read(url, read)

    def _wait(self, limit: RateLimit | None, size: int) -> None:
        if limit is not None and limit.rate < math.inf:
            limit.wait(size, self._sleep)

    def _admit_write(self, name: str, size: int) -> None:
        """Checks that there is space, if it is time to look, and waits until the bytes may pass."""
        if self._min_free is not None and size:
            with self._lock:
                self._unchecked_bytes -= size
                if self._unchecked_bytes <= 0:
                    spare_bytes = require_free_space(self.inner, self._min_free, size, name)
                    self._unchecked_bytes = CHECK_BYTES if spare_bytes is None else min(CHECK_BYTES, spare_bytes)
        if self._writes is not None and self._writes.rate < math.inf:
            self._writes.wait(size, self._sleep)


class _ThrottledWriter:
    """Waits before each append, which stays whole."""

    def __init__(self, backend: StoreBackend, name: str, inner: ObjectWriter) -> None:
        self._backend = backend
        self._name = name
        self._inner = inner

    def append(self, data: Sequence[Buffer]) -> int:
        views = byte_views(data)
        self._backend._admit_write(self._name, sum(map(len, views)))
        return self._inner.append(views)

    def close(self) -> None:
        self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

"""Names for the objects that one process writes: a series of ids, which a writer record assigns to the process.

A background thread writes the record, so no save waits for it. If it cannot be written, gc only frees later what a killed process
left behind.
"""

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.common.ids import Clock, IdSource, Ulid, in_series, series_of
from tensorstore_ck.common.processes import Process
from tensorstore_ck.common.threads import Helper, ProcessLock
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.writer_record import SERIES_SECONDS, WriterRecord

CLOSE_SECONDS: Final = 5.0


class ObjectIds:
    """An `IdSource` for one open store. A forked child begins a new series, and so does a process after `SERIES_SECONDS`."""

    def __init__(self, backend: Backend, new_id: IdSource, clock: Clock, find_process: Callable[[], Process | None]) -> None:
        """`find_process` returns this process; if it returns None, names are of no series."""
        self._backend = backend
        self._new_id = new_id
        self._clock = clock
        self._find_process = find_process
        self._lock = ProcessLock()
        self._pid = 0
        self._begun_ns = 0
        self._record: WriterRecord | None = None
        self._thread: threading.Thread | None = None
        self._leaves_objects = False

    def __call__(self) -> Ulid:
        """A new name."""
        with self._lock.here:
            if self._pid != os.getpid() or abs(self._clock() - self._begun_ns) >= SERIES_SECONDS * 1e9:
                self._begin()
            record = self._record
            self._leaves_objects = True
        return self._new_id() if record is None else in_series(self._new_id(), record.series)

    def published(self) -> None:
        """All objects named until now are in a snapshot: if the process ends now, it leaves nothing behind."""
        self._leaves_objects = False

    def close(self) -> None:
        """Deletes the record if it is useless now; never raises."""
        if self._thread is None or self._record is None or self._pid != os.getpid():
            return
        self._thread.join(CLOSE_SECONDS)
        if not self._leaves_objects and not self._thread.is_alive():
            with suppress(StoreError):  # a writer may lack the permission to delete; gc deletes the record then
                self._backend.delete([self._record.name])
        self._thread = None

    def _begin(self) -> None:
        self._pid, self._begun_ns = os.getpid(), self._clock()
        process = self._find_process()
        self._record = None if process is None else WriterRecord(series_of(self._new_id()), process, self._begun_ns)
        if self._record is not None:
            thread = Helper(partial(self._write, self._record), "tsck writer record")
            with suppress(RuntimeError, MemoryError):  # no thread available: then leftovers of this process wait for their age
                thread.start()
                self._thread = thread

    def _write(self, record: WriterRecord) -> None:
        with suppress(StoreError):
            self._backend.put(record.name, record.encode())

"""Writer records: which processes that left objects behind have certainly ended, and which records are useless.

An unreferenced object belongs to a running save or to an interrupted one. Its age shows which after a day. A writer record shows it at
once, if this host knows that the process has ended. Like ages, records affect only efficiency: if gc frees objects of a running save, the
save writes them again (PROTOCOL.md).
"""

from collections.abc import Collection
from contextlib import suppress

from tensorstore_ck.common.ids import Series
from tensorstore_ck.common.processes import has_ended
from tensorstore_ck.common.threads import REMOTE_THREADS, for_each
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.errors import StoreError
from tensorstore_ck.format.writer_record import MAX_RECORD_BYTES, SERIES_SECONDS, WRITERS, decode_writer_record, writer_record_name


class WriterRecords:
    """The writer records of one listing."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._modified_ns = {info.name: info.modified_ns for info in engine.backend.list(WRITERS)}
        self.requests = 1 + len(self._modified_ns) // 1000

    def ended(self, series: Collection[Series]) -> set[Series]:
        """The series whose process has certainly ended."""
        us = self._engine.find_process()
        there = [item for item in series if writer_record_name(item) in self._modified_ns] if us is not None else []
        ended: set[Series] = set()

        def judge(item: Series) -> None:
            name = writer_record_name(item)
            with suppress(StoreError):  # an unreadable record proves nothing
                record = decode_writer_record(self._engine.backend.get(name, max_bytes=MAX_RECORD_BYTES), name)
                if us is not None and has_ended(record.process, us):
                    ended.add(item)

        for_each(there, judge, 1 if self._engine.backend.is_local else REMOTE_THREADS)
        self.requests += len(there)
        return ended

    def useless(self, ended: Collection[Series], now_ns: int, min_age_seconds: float) -> list[str]:
        """Records of ended series, and records too old for any of their objects to be young."""
        oldest_ns = now_ns - int((SERIES_SECONDS + min_age_seconds) * 1e9)
        names = {writer_record_name(series) for series in ended}
        return sorted(name for name, modified_ns in self._modified_ns.items() if name in names or modified_ns < oldest_ns)

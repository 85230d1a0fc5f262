"""Writer records: which process leaves one, when, and that no save suffers from it."""

import os
import threading

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Ulid, new_ulid, ulid_text
from tensorstore_ck.common.processes import Process
from tensorstore_ck.engine.object_ids import ObjectIds
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, PermissionDeniedError, StoreError
from tensorstore_ck.format.writer_record import SERIES_SECONDS, WriterRecord, decode_writer_record, series_of, writer_record_name
from tests.effort import PATIENCE_SECONDS
from tests.gc.stores import Clock

PROCESS = Process("node7/0123abcd", "boot", "pid:[4026532222]", 42, 4711)


class Slow(MemoryBackend):
    """Writes nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def put(self, name: str, data: Buffer) -> None:
        assert self.may_go_on.wait(PATIENCE_SECONDS)
        super().put(name, data)


def names(backend: MemoryBackend) -> list[str]:
    return sorted(info.name for info in backend.list(""))


def source(backend: MemoryBackend, clock: Clock | None = None) -> ObjectIds:
    return ObjectIds(backend, new_ulid, clock or Clock(), lambda: PROCESS)


def written(ids: ObjectIds) -> None:
    assert ids._thread is not None
    ids._thread.join(PATIENCE_SECONDS)


def test_all_names_of_a_process_are_of_the_series_in_its_record() -> None:
    backend = MemoryBackend()
    ids = source(backend)
    drawn = [ids() for _ in range(100)]
    written(ids)
    [name] = names(backend)
    record = decode_writer_record(backend.get(name, max_bytes=1000), name)
    assert record.process == PROCESS
    assert {series_of(ulid) for ulid in drawn} == {record.series}
    assert {f"writers/{ulid_text(ulid)[10:18]}" for ulid in drawn} == {name}, "as a person sees it"
    assert len(set(drawn)) == 100


def test_nobody_waits_for_the_record() -> None:
    backend = Slow()
    ids = source(backend)
    ids()
    ids()
    assert names(backend) == []
    backend.may_go_on.set()
    written(ids)
    assert len(names(backend)) == 1


def test_a_record_that_cannot_be_written_hurts_nobody() -> None:
    class Refusing(MemoryBackend):
        def put(self, name: str, data: Buffer) -> None:
            raise BackendUnavailableError("injected")

    ids = source(Refusing())
    ids()
    written(ids)
    ids()
    ids.close()


def test_two_processes_have_two_series() -> None:
    backend = MemoryBackend()
    one, two = source(backend), source(backend)
    assert series_of(one()) != series_of(two())
    written(one)
    written(two)
    assert len(names(backend)) == 2


def test_a_long_run_begins_a_new_series_now_and_then() -> None:
    clock, backend = Clock(), MemoryBackend()
    ids = source(backend, clock)
    first = ids()
    clock.advance(SERIES_SECONDS - 1)
    assert series_of(ids()) == series_of(first)
    written(ids)
    clock.advance(1)
    assert series_of(ids()) != series_of(first)
    written(ids)
    assert len(names(backend)) == 2


def test_a_fork_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = MemoryBackend()
    ids = source(backend)
    first = ids()
    written(ids)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert series_of(ids()) != series_of(first)
    written(ids)
    monkeypatch.setattr(os, "getpid", lambda: pid)
    ids.published()
    ids.close()
    assert len(names(backend)) == 2, "a parent removes nothing of its child's"


def test_who_leaves_nothing_behind_takes_the_record_away() -> None:
    backend = MemoryBackend()
    ids = source(backend)
    ids()
    ids.published()
    ids.close()
    assert names(backend) == []
    ids.close()


def test_who_leaves_something_behind_leaves_the_record() -> None:
    backend = MemoryBackend()
    ids = source(backend)
    ids()
    ids.published()
    ids()
    ids.close()
    assert len(names(backend)) == 1


def test_a_process_that_saved_nothing_writes_nothing() -> None:
    backend = MemoryBackend()
    ids = source(backend)
    ids.close()
    assert names(backend) == []


def test_a_writer_that_may_not_delete_leaves_it_to_gc() -> None:
    class Creating(MemoryBackend):
        def delete(self, names: object) -> None:
            raise PermissionDeniedError("injected")

    backend = Creating()
    ids = source(backend)
    ids()
    ids.published()
    ids.close()
    assert len(names(backend)) == 1


def test_where_the_process_is_not_known_names_are_of_no_series() -> None:
    backend = MemoryBackend()
    ids = ObjectIds(backend, new_ulid, Clock(), lambda: None)
    assert series_of(ids()) != series_of(ids())
    ids.close()
    assert names(backend) == []


def test_a_record_under_another_name_or_damaged_is_none() -> None:
    record = WriterRecord(series_of(Ulid(bytes(range(16)))), PROCESS, 5)
    assert decode_writer_record(record.encode(), record.name) == record
    with pytest.raises(CorruptObjectError, match="another series"):
        decode_writer_record(record.encode(), writer_record_name(b"other"))
    data = record.encode()
    for at in range(len(data)):
        with pytest.raises(StoreError):
            decode_writer_record(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], record.name)

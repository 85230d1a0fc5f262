"""Writer records: which process leaves one, when, and that no save suffers from it."""

import os
import threading

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.ids import Ulid, new_ulid, series_of, ulid_text
from tensorstore_ck.common.processes import Process
from tensorstore_ck.engine.object_ids import ObjectIds
from tensorstore_ck.errors import CorruptObjectError, PermissionDeniedError, StoreError
from tensorstore_ck.format.writer_record import SERIES_SECONDS, WriterRecord, decode_writer_record, writer_record_name
from tests.effort import PATIENCE_SECONDS
from tests.gc.stores import Clock, contents

PROCESS = Process("node7/0123abcd", "boot", "pid:[4026532222]", 42, 4711)


def source(backend: MemoryBackend, clock: Clock | None = None) -> ObjectIds:
    return ObjectIds(backend, new_ulid, clock or Clock(), lambda: PROCESS)


def written(ids: ObjectIds) -> None:
    assert ids._thread is not None
    ids._thread.join(PATIENCE_SECONDS)


def test_all_names_of_a_process_are_of_the_series_in_its_record() -> None:
    backend = MemoryBackend()
    ids, other = source(backend), source(backend)
    drawn = [ids() for _ in range(100)]
    written(ids)
    [(name, data)] = contents(backend).items()
    record = decode_writer_record(data, name)
    assert record.process == PROCESS
    assert {series_of(ulid) for ulid in drawn} == {record.series}
    assert {f"writers/{ulid_text(ulid)[10:18]}" for ulid in drawn} == {name}, "as a person sees it"
    assert len(set(drawn)) == 100
    assert series_of(other()) != record.series
    nameless = ObjectIds(MemoryBackend(), new_ulid, Clock(), lambda: None)
    assert series_of(nameless()) != series_of(nameless()), "where the process is not known"


def test_nobody_waits_for_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, may_go_on = MemoryBackend(), threading.Event()
    put = backend.put

    def put_later(name: str, data: Buffer) -> None:
        assert may_go_on.wait(PATIENCE_SECONDS)
        put(name, data)

    monkeypatch.setattr(backend, "put", put_later)
    ids = source(backend)
    ids()
    ids()
    assert not contents(backend)
    may_go_on.set()
    written(ids)
    assert len(contents(backend)) == 1


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
    assert len(sorted(contents(backend))) == 2


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
    assert len(sorted(contents(backend))) == 2, "a parent removes nothing of its child's"


@pytest.mark.parametrize(("saves", "records"), [(["published"], 0), (["published", "dead"], 1), ([], 0)])
def test_who_leaves_nothing_behind_takes_the_record_away(saves: list[str], records: int) -> None:
    backend = MemoryBackend()
    ids = source(backend)
    for outcome in saves:
        ids()
        if outcome == "published":
            ids.published()
    for _ in range(2):
        ids.close()
        assert len(contents(backend)) == records


@pytest.mark.parametrize("refused", ["put", "delete"])
def test_a_key_that_may_not_write_or_delete_records_hurts_nobody(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionDeniedError("injected")

    backend = MemoryBackend()
    monkeypatch.setattr(backend, refused, refuse)
    ids = source(backend)
    ids()
    written(ids)
    ids()
    ids.published()
    ids.close()
    assert len(contents(backend)) == (refused == "delete"), "gc will remove it"


def test_a_record_under_another_name_or_damaged_is_none() -> None:
    record = WriterRecord(series_of(Ulid(bytes(range(16)))), PROCESS, 5)
    assert decode_writer_record(record.encode(), record.name) == record
    with pytest.raises(CorruptObjectError, match="another series"):
        decode_writer_record(record.encode(), writer_record_name(b"other"))
    data = record.encode()
    for at in range(len(data)):
        with pytest.raises(StoreError):
            decode_writer_record(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], record.name)

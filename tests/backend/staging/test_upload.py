"""Uploads from the staging folder: whole and byte-equal whatever fails, and nothing that was complete is sent twice."""

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tensorstore_ck.backend import s3_multipart_writer
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.staging import StagingFolder, Uploader, upload_pass
from tensorstore_ck.backend.staging.upload_journal import JournalEntry
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.errors import (
    BackendUnavailableError,
    CorruptObjectError,
    InvalidOptionError,
    MissingObjectError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
)
from tests.backend.staging.places import PACK, PART, PieceStore, held, journals, staging, unsent
from tests.effort import PATIENCE_SECONDS
from tests.end_to_end.crash.faulty import Death, Faults, FaultyBackend

OTHER_PACK = "packs/0E/01ARZ3NDEKTSV4RRFFQ69G5F0E"
OBJECTS = {PACK: random.Random(1).randbytes(3500), PART: b"part" * 75}
PIECES = {(PACK, 1), (PACK, 2), (PACK, 3), (PACK, 4), (PART, 1)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 1000)
    monkeypatch.setattr(upload_pass, "WRITE_BYTES", 1000)


def uploader(folder: StagingFolder, store: Any, requests: int = 1, **more: Any) -> Uploader:
    more = {"sleep": lambda _: None, "jitter": lambda: 1.0, **more}
    return Uploader(folder, store, max_parallel_requests=requests, **more)


class Told:
    """What a progress bar would show."""

    total = 0

    def __call__(self, count: int) -> None:
        self.total += count
        assert 0 <= self.total <= sum(map(len, OBJECTS.values()))


# --- a crash at every call ------------------------------------------------------------------------------------------


@pytest.mark.race
@pytest.mark.parametrize("mode", ["die-before", "die-after", "unavailable", "lost-reply"])
def test_in_pieces_with_a_fault_at_every_call(tmp_path: Path, mode: str) -> None:
    for at in range(1, 100):
        faults = Faults(mode, at)
        folder, store = staging(tmp_path / str(at), OBJECTS, faults=faults), PieceStore(faults)
        try:
            uploader(folder, store).upload(OBJECTS)
        except (Death, BackendUnavailableError):  # the journal's own faults are not retried
            told = Told()
            store.faults = Faults()
            uploader(staging(tmp_path / str(at), {}), store).upload(OBJECTS, on_bytes=told)
            assert told.total == sum(map(len, OBJECTS.values()))
        assert held(store) == OBJECTS
        resent = {piece: count for piece, count in store.sent.items() if count > 1}
        assert store.sent.keys() == PIECES
        may_be_sent_twice = mode == "lost-reply" and faults.struck.startswith(("upload_part", "put_object"))
        assert list(resent.values()) == [2] * may_be_sent_twice
        before, store.faults = store.sent.copy(), Faults()
        uploader(staging(tmp_path / str(at), {}), store).upload(OBJECTS)
        assert store.sent == before
        if not faults.struck:
            assert at > 9
            return
    raise AssertionError("endless")


@pytest.mark.race
@pytest.mark.parametrize("mode", ["die-before", "die-after", "tear", "unavailable", "lost-reply"])
def test_whole_with_a_fault_at_every_call(tmp_path: Path, mode: str) -> None:
    for at in range(1, 100):
        faults = Faults(mode, at)
        path = tmp_path / str(at)
        place = LocalBackend(str(path / "store")) if mode == "tear" else MemoryBackend()
        folder, told, complete = staging(path, OBJECTS, faults=faults), Told(), set[str]()
        store = Opened(place, faults)
        try:
            uploader(folder, store).upload(OBJECTS, on_bytes=told)
        except (Death, BackendUnavailableError):
            folder = staging(path, {})
            complete = {name for name in OBJECTS if (entry := folder.journal.read(name)) is not None and entry.is_complete}
            store, told = Opened(place, Faults()), Told()
            uploader(folder, store).upload(OBJECTS, on_bytes=told)
        assert held(place) == OBJECTS
        assert told.total == sum(map(len, OBJECTS.values()))
        assert not complete.intersection(store.opened)
        if not faults.struck:
            assert sorted(store.opened) == sorted(OBJECTS)
            assert at > 10
            return
    raise AssertionError("endless")


class Opened(FaultyBackend):
    """Notes what is written."""

    def __init__(self, inner: Backend, faults: Faults) -> None:
        super().__init__(inner, faults, atomic_put=False)
        self.opened: list[str] = []

    def open_whole_writer(self, name: str) -> Any:
        self.opened.append(name)
        return super().open_whole_writer(name)


# --- stores that lose things ----------------------------------------------------------------------------------------


def interrupted(path: Path, store: PieceStore, at: int = 5) -> StagingFolder:
    """Dies when two pieces of the pack are in the store."""
    store.faults = Faults("die-before", at)
    with pytest.raises(Death):
        uploader(staging(path, OBJECTS), store).upload(OBJECTS)
    store.faults = Faults()
    return staging(path, {})


def discard_all(store: PieceStore) -> None:
    store.pending.clear()


def cut_a_piece(store: PieceStore) -> None:
    (pieces,) = store.pending.values()
    pieces[2] = pieces[2][:10]


class ClientError(Exception):
    response: ClassVar = {"Error": {"Code": "InvalidPart"}}


def refuse_the_pieces(store: PieceStore) -> None:
    original, refused = store._complete_multipart_upload, ClientError()

    def complete(**arguments: Any) -> dict[str, Any]:
        if store.sent[PACK, 1] == 1:
            raise BackendUnavailableError("one or more of the specified parts could not be found") from refused
        return original(**arguments)

    store._complete_multipart_upload = complete  # type: ignore[assignment, method-assign]


@pytest.mark.parametrize("trouble", [discard_all, cut_a_piece, refuse_the_pieces])
def test_an_interrupted_upload_whose_pieces_are_no_good_sends_them_again(tmp_path: Path, trouble: Callable[[PieceStore], None]) -> None:
    store, told = PieceStore(), Told()
    folder = interrupted(tmp_path, store)
    trouble(store)
    uploader(folder, store).upload(OBJECTS, on_bytes=told)
    assert held(store) == OBJECTS
    assert told.total == sum(map(len, OBJECTS.values()))


@pytest.mark.parametrize("marker", ["upload_part", "complete_multipart_upload"])
def test_an_upload_that_goes_while_it_is_under_way(tmp_path: Path, marker: str) -> None:
    store, told = PieceStore(), Told()
    original = store.call

    def call(action: str, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        calls.append(method)
        if method == marker and (method == "complete_multipart_upload" or arguments["PartNumber"] == 3) and not gone:
            gone.append(method)
            store.pending.clear()
        return original(action, name, method, **arguments)

    gone: list[str] = []
    calls: list[str] = []
    store.call = call  # type: ignore[method-assign]
    uploader(staging(tmp_path, OBJECTS), store).upload(OBJECTS, on_bytes=told)
    assert gone
    assert calls.count("upload_part") == 3 + 4 if marker == "upload_part" else 4 + 4
    assert held(store) == OBJECTS
    assert told.total == sum(map(len, OBJECTS.values()))


@pytest.mark.parametrize("make", [PieceStore, MemoryBackend])
def test_a_complete_object_that_the_store_lost_is_sent_again(tmp_path: Path, make: type[MemoryBackend]) -> None:
    folder, store = staging(tmp_path, OBJECTS), make()
    uploader(folder, store).upload(OBJECTS)
    store.delete([PACK])
    assert uploader(folder, store).upload(OBJECTS) == []
    assert held(store) == OBJECTS


@pytest.mark.parametrize("make", [PieceStore, MemoryBackend])
@pytest.mark.parametrize("is_complete", [False, True])
@pytest.mark.parametrize("other", [b"torn", bytes(len(OBJECTS[PACK]))])
def test_another_object_of_that_name_is_left_alone(tmp_path: Path, make: type[MemoryBackend], other: bytes, is_complete: bool) -> None:
    """It may be published. The caller chooses another name, under which the next upload sends the file."""
    folder, store = staging(tmp_path, OBJECTS), make()
    store.put(PACK, other)
    folder.journal.write(JournalEntry(PACK, is_complete=is_complete and len(other) != len(OBJECTS[PACK])))
    assert uploader(folder, store).upload(OBJECTS) == [PACK]
    assert held(store) == {PACK: other, PART: OBJECTS[PART]}
    folder.journal.write(JournalEntry(PACK, stored_as=OTHER_PACK))
    assert uploader(folder, store).upload(OBJECTS) == []
    assert held(store) == {PACK: other, OTHER_PACK: OBJECTS[PACK], PART: OBJECTS[PART]}
    folder.publish([PACK])
    assert folder.copies.get(OTHER_PACK) == OBJECTS[PACK]


@pytest.mark.parametrize("make", [PieceStore, MemoryBackend])
@pytest.mark.parametrize("is_read_only_once", [False, True])
def test_the_same_object_by_another_process_is_not_sent_again(tmp_path: Path, make: type[MemoryBackend], is_read_only_once: bool) -> None:
    folder, store, told = staging(tmp_path, OBJECTS), make(), Told()
    store.put(PACK, OBJECTS[PACK])
    read = store.read_into

    def read_into(name: str, offset: int, target: memoryview) -> None:
        if is_read_only_once and offset:
            raise PermissionDeniedError("may only write")
        read(name, offset, target)

    store.read_into = read_into  # type: ignore[method-assign]
    assert uploader(folder, store).upload(OBJECTS, on_bytes=told) == [PACK] * is_read_only_once
    assert held(store) == OBJECTS
    assert told.total == sum(map(len, OBJECTS.values())) - len(OBJECTS[PACK]) * is_read_only_once


def test_an_object_that_appears_while_it_is_sent_is_compared(tmp_path: Path) -> None:
    """Another process, with a copy of the file, was faster: the refusal is no error."""
    store, folder = MemoryBackend(), staging(tmp_path, OBJECTS)

    def appear(count: int) -> None:
        if count > 0 and PACK not in held(store):
            store.put(PACK, OBJECTS[PACK])

    assert uploader(folder, store).upload(OBJECTS, on_bytes=appear) == []
    assert held(store) == OBJECTS


def test_a_file_that_was_published_before_it_was_locked_is_not_sent(tmp_path: Path) -> None:
    folder, store = staging(tmp_path, OBJECTS), MemoryBackend()
    file = folder.open_unsent(PACK)
    uploader(folder, store).upload(OBJECTS)
    folder.publish(OBJECTS)
    assert not file.lock()
    file.close()


@pytest.mark.parametrize(
    ("make", "damaged"),
    [
        (PieceStore, b""),
        (MemoryBackend, b'{"name": 1}'),
        (PieceStore, b'{"name": "other", "token": "", "is_complete": true}'),
        (MemoryBackend, b"x" * 100_000),
    ],
)
def test_a_damaged_journal_costs_a_comparison(tmp_path: Path, make: type[MemoryBackend], damaged: bytes) -> None:
    folder, store = staging(tmp_path, OBJECTS), make()
    uploader(folder, store).upload(OBJECTS)
    for journal in journals(folder):
        (Path(folder.path) / journal).write_bytes(damaged)
    assert uploader(folder, store).upload(OBJECTS) == []
    assert held(store) == OBJECTS


def test_sizes_of_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECES_OF_ONE_SIZE", 3)
    for size, pieces in [(0, 1), (1, 1), (1000, 1), (1001, 2), (3000, 3), (3001, 4), (5000, 4), (5001, 5)]:
        store, data = PieceStore(), random.Random(size).randbytes(size)
        uploader(staging(tmp_path / str(size), {PACK: data}), store).upload([PACK])
        assert held(store) == {PACK: data}
        assert len(store.sent) == pieces


# --- many at once ---------------------------------------------------------------------------------------------------


def test_pieces_go_side_by_side_but_no_more_than_allowed(tmp_path: Path) -> None:
    store = PieceStore()
    together, under_way, most = threading.Barrier(3, timeout=PATIENCE_SECONDS), [], []
    original = store._upload_part

    def upload_part(**arguments: Any) -> dict[str, Any]:
        under_way.append(1)
        most.append(len(under_way))
        together.wait()
        under_way.pop()
        return original(**arguments)

    store._upload_part = upload_part  # type: ignore[assignment, method-assign]
    data = {PACK: bytes(4001), PART: bytes(3001)}
    uploader(staging(tmp_path, data), store, requests=3).upload(data)
    assert held(store) == data
    assert max(most) == 3


def test_the_first_error_ends_all(tmp_path: Path) -> None:
    store = PieceStore(Faults("no-space", 4))
    with pytest.raises(NoSpaceError):
        uploader(staging(tmp_path, OBJECTS), store, requests=3).upload(OBJECTS)
    assert not [thread for thread in threading.enumerate() if thread.name == "tsck"]


def test_what_another_process_uploads_is_waited_for(tmp_path: Path) -> None:
    folder, store, naps = staging(tmp_path, OBJECTS), PieceStore(), []
    other = folder.open_unsent(PACK)
    assert other.lock()

    def sleep(seconds: float) -> None:
        assert held(store) == {PART: OBJECTS[PART]}, "the other objects do not wait"
        naps.append(seconds)
        if len(naps) == 10:
            other.close()  # it died

    uploader(folder, store, sleep=sleep).upload(OBJECTS)
    assert len(naps) >= 10
    assert held(store) == OBJECTS


# --- waiting --------------------------------------------------------------------------------------------------------


def test_a_storm_is_waited_out_with_longer_and_longer_waits(tmp_path: Path) -> None:
    store = PieceStore(Faults("unavailable", 3, persistent=True))
    waits: list[float] = []

    def on_retry(error: StoreError, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 10:
            store.faults = Faults()

    slept: list[float] = []
    uploader(staging(tmp_path, OBJECTS), store, sleep=slept.append).upload(OBJECTS, on_retry=on_retry)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30, 30]
    assert sum(slept) == pytest.approx(sum(waits))
    assert held(store) == OBJECTS


class Enough(Exception):
    pass


@pytest.mark.parametrize("make", [PieceStore, lambda faults: FaultyBackend(MemoryBackend(), faults, atomic_put=True)])
def test_stop_ends_a_storm(tmp_path: Path, make: Callable[[Faults], Any]) -> None:
    napped = 0

    def sleep(seconds: float) -> None:
        nonlocal napped
        napped += 1

    def stop() -> None:
        if napped > 500:
            raise Enough

    folder = staging(tmp_path, OBJECTS)
    with pytest.raises(Enough):
        uploader(folder, make(Faults("unavailable", 2, persistent=True)), 2, sleep=sleep).upload(OBJECTS, stop=stop)
    assert unsent(folder) == set(OBJECTS)


@pytest.mark.parametrize("make", [PieceStore, MemoryBackend])
def test_the_rate_is_held(tmp_path: Path, make: type[MemoryBackend]) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    folder = staging(tmp_path, {PACK: bytes(40_000), PART: bytes(10_000)})
    limit = RateLimit(500.0, clock=lambda: now)
    uploader(folder, make(), limit=limit, sleep=sleep).upload([PACK, PART])
    assert now == pytest.approx(100, rel=0.05)


def test_stop_ends_the_wait_for_a_turn(tmp_path: Path) -> None:
    naps: list[float] = []

    def stop() -> None:
        if len(naps) == 5:
            raise Enough

    with pytest.raises(Enough):
        uploader(staging(tmp_path, OBJECTS), PieceStore(), limit=RateLimit(0.001), sleep=naps.append).upload(OBJECTS, stop=stop)
    assert sum(naps) <= 1


# --- refusals -------------------------------------------------------------------------------------------------------


def test_what_was_published_meanwhile_is_fine(tmp_path: Path) -> None:
    folder, store, told = staging(tmp_path, OBJECTS), PieceStore(), Told()
    uploader(folder, store).upload(OBJECTS)
    folder.publish([PACK])
    uploader(folder, store).upload(OBJECTS, on_bytes=told)
    assert told.total == sum(map(len, OBJECTS.values()))


def test_what_is_nowhere_is_missing(tmp_path: Path) -> None:
    with pytest.raises(MissingObjectError) as caught:
        uploader(staging(tmp_path, {}), PieceStore()).upload([PACK])
    assert caught.value.object_id == PACK


def test_a_file_that_lost_its_end_is_not_sent(tmp_path: Path) -> None:
    folder, store = staging(tmp_path, OBJECTS), PieceStore()

    def shorten(_: int) -> None:
        with (Path(folder.path) / "unsent" / PACK).open("r+b") as file:
            file.truncate(10)

    with pytest.raises(CorruptObjectError) as caught:
        uploader(folder, store).upload(OBJECTS, on_bytes=shorten)
    assert caught.value.object_id == PACK
    assert PACK not in held(store)


def test_no_requests_at_all(tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="max_parallel_requests"):
        Uploader(staging(tmp_path, {}), PieceStore(), max_parallel_requests=0)


# --- giving up ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", [PieceStore(), MemoryBackend()], ids=["pieces", "whole"])
def test_drop_leaves_nothing(tmp_path: Path, store: MemoryBackend) -> None:
    folder = interrupted(tmp_path, store) if isinstance(store, PieceStore) else staging(tmp_path, OBJECTS)
    for _ in range(2):
        uploader(folder, store).drop(OBJECTS)
        assert not unsent(folder)
        assert not journals(folder)
        assert not held(store)
    assert not getattr(store, "pending", None)


def test_drop_does_not_need_the_store(tmp_path: Path) -> None:
    store = PieceStore()
    folder = interrupted(tmp_path, store)
    store.faults = Faults("unavailable", 1, persistent=True)
    folder.journal.write(JournalEntry(PART, "1000/other"))
    uploader(folder, store).drop(OBJECTS)
    assert not unsent(folder)
    assert not journals(folder)
    assert store.faults.calls == 1, "a server that does not answer is asked once"

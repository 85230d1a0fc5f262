"""Reads through the staging folder: what was read once is local, and whatever the folder does, the bytes are the store's."""

import itertools
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.staging import ReadThroughBackend, StagingFolder, Uploader, read_through_backend
from tensorstore_ck.backend.staging import sparse_files as copies_module
from tensorstore_ck.backend.staging.sparse_files import GRAIN_BYTES
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, MissingObjectError, StoreError
from tests.backend.staging.places import PACK, PART, UUID, held, staging, unsent
from tests.maintenance.copy_store.places import Watched

KIB = 1 << 10
DATA = random.Random(1).randbytes(1_000_003)
SNAPSHOT = "snapshots/0C/01ARZ3NDEKTSV4RRFFQ69G5F0C"


@pytest.fixture
def inner() -> MemoryBackend:
    made = MemoryBackend()
    made.put(PACK, DATA)
    made.put(PART, b"part")
    return made


@pytest.fixture
def store(inner: MemoryBackend) -> Watched:
    return Watched(inner)


@pytest.fixture
def folder(tmp_path: Path) -> StagingFolder:
    return StagingFolder(tmp_path, UUID, 1 << 30)


@pytest.fixture
def tiered(folder: StagingFolder, store: Any) -> ReadThroughBackend:
    return ReadThroughBackend(folder, store)


def read(backend: ReadThroughBackend, offset: int, size: int, name: str = PACK) -> bytes:
    target = bytearray(size)
    backend.read_into(name, offset, memoryview(target))
    return bytes(target)


def reads(store: Watched) -> int:
    return sum(call in ("read_into", "get") for call, _ in store.calls)


# --- copies ---------------------------------------------------------------------------------------------------------


def test_what_was_read_once_is_local(tiered: ReadThroughBackend, store: Watched) -> None:
    for _ in range(3):
        assert read(tiered, 100_001, 300_000) == DATA[100_001:400_001]
        assert read(tiered, 150_000, 7) == DATA[150_000:150_007]
        assert tiered.get(PART, max_bytes=100) == b"part"
    assert reads(store) == 2
    assert store.bytes_read <= 300_000 + 2 * GRAIN_BYTES


def test_a_restore_in_any_order_is_local_the_second_time(tiered: ReadThroughBackend, store: Watched) -> None:
    """Ranges that touch where no grain ends, with gaps, to the last byte."""
    cuts = sorted(random.Random(2).sample(range(len(DATA)), 30))
    ranges = [*itertools.pairwise(cuts), (cuts[-1], len(DATA))]
    random.Random(3).shuffle(ranges)
    counts = []
    for backend in (tiered, tiered, ReadThroughBackend(tiered.folder, tiered.store)):
        for start, end in ranges:
            assert read(backend, start, end - start) == DATA[start:end]
        counts.append(reads(store))
    assert counts[0] > 10
    assert set(counts) == {counts[0]}


def test_a_range_with_a_hole_comes_from_the_store(tiered: ReadThroughBackend, store: Watched) -> None:
    read(tiered, 0, 10)
    read(tiered, 4 * GRAIN_BYTES, 10)
    assert read(tiered, 5, 5 * GRAIN_BYTES) == DATA[5 : 5 + 5 * GRAIN_BYTES]
    assert reads(store) == 3
    assert read(tiered, 2 * GRAIN_BYTES, 10) == DATA[2 * GRAIN_BYTES : 2 * GRAIN_BYTES + 10]
    assert reads(store) == 3
    assert tiered.get(PACK, max_bytes=len(DATA)) == DATA


def test_zeros_are_not_holes(tmp_path: Path, folder: StagingFolder) -> None:
    inner = MemoryBackend()
    inner.put(PACK, bytes(500_000))
    store = Watched(inner)
    tiered = ReadThroughBackend(folder, store)
    for _ in range(2):
        assert read(tiered, 1, 499_999) == bytes(499_999)
    assert reads(store) == 1


def test_large_ranges_are_fetched_in_slices(tiered: ReadThroughBackend, store: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_through_backend, "FETCH_BYTES", 100_000)
    for _ in range(2):
        assert read(tiered, 3, 1_000_000) == DATA[3:]
    assert reads(store) == 10


def test_many_threads(tiered: ReadThroughBackend, store: Watched) -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(60):
            start = source.randrange(len(DATA))
            end = min(len(DATA), start + source.randrange(200_000))
            if read(tiered, start, end - start) != DATA[start:end]:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert reads(store) < 120


def test_only_immutable_objects_are_kept(tiered: ReadThroughBackend, store: Watched, inner: MemoryBackend) -> None:
    names = ["store.json", "log/00000000000000000/00000000000000000001", "checkpoint/00000000000000000001", "gc/01"]
    for name in names:
        inner.put(name, b"first")
        assert tiered.get(name, max_bytes=10) == b"first"
        assert read(tiered, 1, 2, name) == b"ir"
        inner.replace(name, b"other")
        assert tiered.get(name, max_bytes=10) == b"other"
    assert not list(tiered.folder.copies.files())


def test_a_copy_goes_with_its_object(tiered: ReadThroughBackend, folder: StagingFolder, inner: MemoryBackend) -> None:
    read(tiered, 0, 1000)
    tiered.get(PART, max_bytes=10)
    tiered.replace(PART, b"mended")
    assert tiered.get(PART, max_bytes=10) == b"mended"
    tiered.delete(iter([PACK, PART, "log/1"]))
    assert not held(inner)
    assert not list(folder.copies.files())
    with pytest.raises(MissingObjectError):
        read(tiered, 0, 1000)


def test_an_object_of_a_size_that_the_copy_has_not(tiered: ReadThroughBackend, folder: StagingFolder, inner: MemoryBackend) -> None:
    """A process died when it had made the file, and nothing more."""
    path = Path(folder.path, folder.copies.path(PACK))
    path.parent.mkdir(parents=True)
    path.touch()
    for _ in range(2):
        assert read(tiered, 10, 70_000) == DATA[10:70_010]
    with pytest.raises(CorruptObjectError):
        read(tiered, len(DATA) - 5, 6)
    with pytest.raises(CorruptObjectError):
        tiered.get(PACK, max_bytes=10)


# --- what is not published yet --------------------------------------------------------------------------------------


def test_what_is_not_published_is_read_here(tmp_path: Path) -> None:
    folder, store = staging(tmp_path, {PACK: DATA, SNAPSHOT: b"snapshot"}), MemoryBackend()
    tiered = ReadThroughBackend(folder, store)
    for _ in range(2):
        assert read(tiered, 5, 1000) == DATA[5:1005]
        assert tiered.get(SNAPSHOT, max_bytes=10) == b"snapshot"
        Uploader(folder, store).upload([PACK, SNAPSHOT])
        folder.publish([PACK, SNAPSHOT])
    assert tiered.size(PACK) == len(DATA)


def test_size_is_what_the_store_has(tmp_path: Path) -> None:
    """A copy must not hide that the store lost its object, or later snapshots would rely on it."""
    folder = staging(tmp_path, {PACK: DATA})
    tiered = ReadThroughBackend(folder, MemoryBackend())
    assert tiered.size(PACK) == len(DATA)
    folder.publish([PACK])
    with pytest.raises(MissingObjectError):
        tiered.size(PACK)


# --- faults ---------------------------------------------------------------------------------------------------------


def test_a_corrupt_copy_is_healed_from_the_store(tiered: ReadThroughBackend, folder: StagingFolder, store: Watched) -> None:
    read(tiered, 0, 1000)
    with Path(folder.path, folder.copies.path(PACK)).open("r+b") as file:
        file.write(b"wrong")
    assert read(tiered, 0, 5) == b"wrong"
    assert tiered.distrust(PACK)
    for _ in range(2):
        assert read(tiered, 0, 5) == DATA[:5]
    assert not folder.copies.size(PACK)
    other = ReadThroughBackend(folder, tiered.store)
    for _ in range(2):
        assert read(other, 0, 5) == DATA[:5]
    assert folder.copies.size(PACK)


def test_a_corrupt_staged_object_is_healed_once_the_store_has_it(tmp_path: Path) -> None:
    folder, store = staging(tmp_path, {PACK: DATA}), MemoryBackend()
    tiered = ReadThroughBackend(folder, store)
    assert not tiered.distrust(PACK), "nobody else has it"
    Uploader(folder, store).upload([PACK])
    (Path(folder.path) / "unsent" / PACK).write_bytes(b"x" * len(DATA))
    assert read(tiered, 0, 5) == b"xxxxx"
    store.delete([PACK])
    assert not tiered.distrust(PACK)
    store.put(PACK, DATA)
    assert tiered.distrust(PACK)
    assert not unsent(folder)
    assert read(tiered, 0, 5) == DATA[:5]


def test_only_what_is_kept_can_be_distrusted(tiered: ReadThroughBackend) -> None:
    assert not tiered.distrust("log/1")


def test_missing_space_is_no_failure(tmp_path: Path, store: Any) -> None:
    folder = staging(tmp_path, {SNAPSHOT: bytes(200 * KIB)}, capacity_bytes=256 * KIB)
    tiered = ReadThroughBackend(folder, store)
    for start in range(0, 900_000, 100_000):
        assert read(tiered, start, 100_000) == DATA[start : start + 100_000]
    assert tiered.get(PART, max_bytes=10) == b"part"
    assert folder.used_bytes() <= 256 * KIB
    assert unsent(folder) == {SNAPSHOT}


def test_older_copies_are_removed_for_space(tmp_path: Path) -> None:
    names = [f"packs/0A/01ARZ3NDEKTSV4RRFFQ69G5F0{last}" for last in "ABCDEFGH"]
    inner = MemoryBackend()
    for name in names:
        inner.put(name, DATA[:100_000])
    store = Watched(inner)
    folder = staging(tmp_path, {}, capacity_bytes=512 * KIB)
    tiered = ReadThroughBackend(folder, store)
    for name in names:
        assert read(tiered, 0, 100_000, name) == DATA[:100_000]
        assert folder.used_bytes() <= 512 * KIB
    store.calls = []
    assert read(tiered, 0, 100_000, names[-1]) == DATA[:100_000]
    assert not store.calls
    assert read(tiered, 0, 100_000, names[0]) == DATA[:100_000]
    assert store.calls


@pytest.mark.parametrize("failing", ["a file in the way", "a full disk", "a disk that fails", "no holes"])
def test_a_bad_disk_is_no_reason_to_fail(
    tiered: ReadThroughBackend, folder: StagingFolder, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28 if failing == "a full disk" else 5, failing)

    if failing == "a file in the way":
        Path(folder.path).mkdir()
        (Path(folder.path) / "copies").write_text("")
        (Path(folder.path) / "unsent").write_text("")
    elif failing == "no holes":
        monkeypatch.setattr(os, "lseek", lambda fd, offset, how: 1 << 40)
    else:
        monkeypatch.setattr(copies_module, "write_at", fail)
        monkeypatch.setattr(folder.copies._whole, "replace", fail)
    for start in (500_000, 500_000, 10):
        assert read(tiered, start, 300_000) == DATA[start : start + 300_000]
        assert tiered.get(PART, max_bytes=10) == b"part"


def test_a_staged_object_that_cannot_be_read_comes_from_the_store_or_says_why(
    tiered: ReadThroughBackend, folder: StagingFolder, inner: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise BackendUnavailableError("the disk reported an error")

    monkeypatch.setattr(folder.unsent, "read_into", fail)
    monkeypatch.setattr(folder.unsent, "get", fail)
    assert read(tiered, 0, 5) == DATA[:5]
    assert tiered.get(PART, max_bytes=10) == b"part"
    inner.delete([PACK, PART])
    attempts: list[Callable[[], object]] = [lambda: read(tiered, 500_000, 5), lambda: tiered.get(SNAPSHOT, max_bytes=10)]
    for attempt in attempts:
        with pytest.raises(BackendUnavailableError, match="disk"):
            attempt()


def test_errors_of_the_store_are_its_own(tiered: ReadThroughBackend) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: tiered.get(SNAPSHOT, max_bytes=10),
        lambda: read(tiered, 0, 1, SNAPSHOT),
        lambda: tiered.size(SNAPSHOT),
    ]
    for attempt in attempts:
        with pytest.raises(StoreError) as caught:
            attempt()
        assert isinstance(caught.value, MissingObjectError)
        assert caught.value.object_id == SNAPSHOT


def test_everything_else_is_the_stores(tiered: ReadThroughBackend, inner: MemoryBackend) -> None:
    tiered.put("parts/0D/one", b"one")
    tiered.create("log/1", b"entry")
    writer = tiered.open_writer("packs/0D/two")
    writer.append([b"two"])
    assert len(list(tiered.list_uploads())) == 1
    for upload in tiered.list_uploads():
        tiered.abort_upload(upload.name)
    writer.close()
    tiered.sync_folders("log/1")
    assert {info.name for info in tiered.list("")} == held(inner).keys()
    assert held(inner)["packs/0D/two"] == b"two"
    assert tiered.space() is None
    assert tiered.is_local
    assert tiered.url == inner.url
    tiered.close()

"""What every backend promises, tried on each of them."""

import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tensorstore_ck.backend import Backend, Buffer, Created, open_backend, s3_multipart_writer
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, MissingObjectError
from tests.servers import ObjectServer, S3Server

MIB = 1 << 20
S3_KINDS = ["moto", pytest.param("seaweedfs", marks=pytest.mark.s3)]
LARGE_BODIES = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs and adlfs do
KINDS = ["local", "memory", "fsspec-memory", *S3_KINDS]
KINDS += [pytest.param("gcs", marks=LARGE_BODIES), pytest.param("azure", marks=LARGE_BODIES)]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 * MIB)  # the smallest that S3 takes


def make_backend(kind: str, request: pytest.FixtureRequest) -> Backend:
    """A backend at a location that nobody else uses."""
    if kind == "local":
        path: Path = request.getfixturevalue("tmp_path")
        return LocalBackend(str(path / "store"))
    if kind == "memory":
        return MemoryBackend()
    if kind == "fsspec-memory":
        return open_backend(f"memory://{uuid.uuid4()}")
    server: S3Server | ObjectServer = request.getfixturevalue(f"{kind}_server")
    return open_backend(f"{server.url}/{uuid.uuid4()}/store", server.storage_options)


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = make_backend(request.param, request)
    yield made
    made.close()


@pytest.fixture(params=["memory", *S3_KINDS])
def backend_with_uploads(request: pytest.FixtureRequest) -> Iterator[Backend]:
    made = make_backend(request.param, request)
    yield made
    made.close()


def read(backend: Backend, name: str, offset: int, size: int) -> bytes:
    target = bytearray(size)
    backend.read_into(name, offset, memoryview(target))
    return bytes(target)


def names(backend: Backend, prefix: str = "") -> set[str]:
    return {found.name for found in backend.list(prefix)}


def test_a_put_never_writes_over_an_object(backend: Backend) -> None:
    backend.put("parts/0A/one", b"first")
    with pytest.raises(BackendUnavailableError):
        backend.put("parts/0A/one", b"other")
    assert backend.get("parts/0A/one", max_bytes=10) == b"first"
    backend.replace("parts/0A/one", b"third")
    assert backend.get("parts/0A/one", max_bytes=10) == b"third"


@pytest.mark.parametrize("data", [b"", b"x", bytearray(b"abc"), memoryview(b"abcd"), os.urandom(3 * MIB)])
def test_put_is_read_back(backend: Backend, data: bytes) -> None:
    backend.put("parts/0A/one", data)
    assert backend.get("parts/0A/one", max_bytes=len(data)) == data
    assert backend.size("parts/0A/one") == len(data)


def test_read_into_fills_any_range(backend: Backend) -> None:
    data = os.urandom(100_000)
    backend.put("packs/0A/one", data)
    for offset, size in [(0, 100_000), (0, 1), (99_999, 1), (1234, 50_000), (100_000, 0)]:
        assert read(backend, "packs/0A/one", offset, size) == data[offset : offset + size]


def test_an_object_that_is_too_short_or_too_long_is_corrupt(backend: Backend) -> None:
    backend.put("packs/0A/one", b"12345")
    for offset, size in [(0, 6), (4, 2), (5, 1), (100, 1)]:
        with pytest.raises(CorruptObjectError) as caught:
            read(backend, "packs/0A/one", offset, size)
        assert caught.value.object_id == "packs/0A/one"
    with pytest.raises(CorruptObjectError):
        backend.get("packs/0A/one", max_bytes=4)


def test_what_is_not_there_is_missing(backend: Backend) -> None:
    backend.put("parts/0A/one", b"x")
    attempts: list[Callable[[str], object]] = [
        lambda name: backend.get(name, max_bytes=10),
        backend.size,
        lambda name: read(backend, name, 0, 1),
    ]
    for name in ("parts/0A/two", "nothing/at/all", "parts/0A"):
        for attempt in attempts:
            with pytest.raises(MissingObjectError) as caught:
                attempt(name)
            assert caught.value.object_id == name


def test_create_wins_once(backend: Backend) -> None:
    assert backend.create("log/1", b"first") is Created.CREATED
    assert backend.create("log/1", b"second") is Created.EXISTS
    assert backend.create("log/1", b"first") is Created.EXISTS
    assert backend.get("log/1", max_bytes=100) == b"first"
    backend.sync_folders("log/1")


@pytest.mark.parametrize("round_number", range(3))
def test_of_racing_creates_one_wins(backend: Backend, round_number: int) -> None:
    start = threading.Barrier(6)

    def create(number: int) -> Created:
        start.wait()
        return backend.create("log/1", b"%d" % number)

    with ThreadPoolExecutor(6) as threads:
        outcomes = list(threads.map(create, range(6)))
    assert outcomes.count(Created.CREATED) == 1
    assert backend.get("log/1", max_bytes=100) == b"%d" % outcomes.index(Created.CREATED)


def test_list_is_recursive_by_folder(backend: Backend) -> None:
    assert names(backend) == set()
    for name in ("store.json", "packs/0A/one", "packs/0B/two", "packs2/three"):
        backend.put(name, b"12345")
    assert names(backend) == {"store.json", "packs/0A/one", "packs/0B/two", "packs2/three"}
    assert names(backend, "packs/") == {"packs/0A/one", "packs/0B/two"}
    assert names(backend, "packs/0A/") == {"packs/0A/one"}
    assert names(backend, "parts/") == set()
    assert names(backend, "store.json/") == set()
    (found,) = backend.list("packs2/")
    assert found.size_bytes == 5
    assert abs(found.modified_ns - time.time_ns()) < 3600 * 10**9


def test_list_has_everything_of_a_large_folder(backend: Backend) -> None:
    expected = {f"parts/0A/{number}" for number in range(1005)}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: backend.put(name, b"x"), expected))
    assert names(backend, "parts/") == expected
    backend.delete(expected)
    assert names(backend, "parts/") == set()


def test_delete_is_idempotent(backend: Backend) -> None:
    backend.put("parts/0A/one", b"x")
    backend.put("parts/0A/two", b"x")
    backend.delete(["parts/0A/one", "parts/0A/never"])
    backend.delete(iter(["parts/0A/one"]))
    backend.delete([])
    assert names(backend) == {"parts/0A/two"}


def test_replace_writes_over(backend: Backend) -> None:
    backend.replace("checkpoint/1", b"old and long")
    backend.replace("checkpoint/1", b"new")
    assert backend.get("checkpoint/1", max_bytes=100) == b"new"
    assert names(backend) == {"checkpoint/1"}


@pytest.mark.parametrize("total", [0, 1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 31 * MIB])
def test_writer_keeps_what_was_appended(backend: Backend, total: int) -> None:
    data = memoryview(os.urandom(total))
    writer = backend.open_writer("packs/0A/one")
    offset = 0
    while offset < total:
        size = min(3 * MIB, total - offset)
        third = size // 3
        pieces: list[Buffer] = [bytes(data[offset : offset + third]), b"", bytearray(data[offset + third : offset + size])]
        assert writer.append(pieces) == offset
        offset += size
    writer.close()
    assert backend.size("packs/0A/one") == total
    assert read(backend, "packs/0A/one", 0, total) == data
    assert list(backend.list_uploads()) == []


def test_writer_takes_several_threads(backend: Backend) -> None:
    sizes = [random.Random(number).randrange(1, 3 * MIB) for number in range(12)]
    bodies = [os.urandom(size) for size in sizes]
    writer = backend.open_writer("packs/0A/one")

    def append(body: bytes) -> int:
        buffer = bytearray(body)
        offset = writer.append([buffer])
        buffer[:] = bytes(len(buffer))  # the writer must not need it any more
        return offset

    with ThreadPoolExecutor(4) as threads:
        offsets = list(threads.map(append, bodies))
    writer.close()
    assert backend.size("packs/0A/one") == sum(sizes)
    for offset, body in zip(offsets, bodies, strict=True):
        assert read(backend, "packs/0A/one", offset, len(body)) == body


@pytest.mark.parametrize("total", [5, 11 * MIB])
def test_aborted_writer_leaves_nothing(backend: Backend, total: int) -> None:
    writer = backend.open_writer("packs/0A/one")
    writer.append([bytes(total)])
    writer.abort()
    writer.abort()
    assert names(backend) == set()
    assert list(backend.list_uploads()) == []


def test_abort_after_close_leaves_the_object(backend: Backend) -> None:
    writer = backend.open_writer("packs/0A/one")
    writer.append([b"abc"])
    writer.close()
    writer.abort()
    assert backend.get("packs/0A/one", max_bytes=10) == b"abc"


def test_unfinished_upload_is_found_and_freed(backend_with_uploads: Backend) -> None:
    backend = backend_with_uploads
    backend.open_writer("packs/0A/left").append([bytes(6 * MIB)])
    assert names(backend) == set()
    (upload,) = backend.list_uploads()
    assert upload.name.startswith("packs/0A/left")
    assert upload.modified_ns > 0  # moto gives every upload the same date
    backend.abort_upload(upload.name)
    assert list(backend.list_uploads()) == []
    backend.abort_upload(upload.name)


BAD_NAMES = ["", "/", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a/.tmp-1", ".hidden", "a\0b", "a\nb", "ä", "a b", "x" * 600]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_leave_the_store_are_refused(backend: Backend, name: str) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: backend.get(name, max_bytes=1),
        lambda: backend.size(name),
        lambda: read(backend, name, 0, 1),
        lambda: backend.put(name, b""),
        lambda: backend.create(name, b""),
        lambda: backend.replace(name, b""),
        lambda: backend.open_writer(name),
        lambda: backend.delete([name]),
        lambda: backend.sync_folders(name),
    ]
    for attempt in attempts:
        with pytest.raises(CorruptObjectError):
            attempt()


@pytest.mark.parametrize("prefix", ["..", "../", "a", "/", "a/../", "a//"])
def test_prefixes_that_could_leave_the_store_are_refused(backend: Backend, prefix: str) -> None:
    with pytest.raises(CorruptObjectError):
        list(backend.list(prefix))


def test_a_forked_child_can_use_it(backend: Backend) -> None:
    backend.put("parts/0A/one", b"from the parent")
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            backend.put("parts/0A/two", backend.get("parts/0A/one", max_bytes=100))
            status = int(backend.get("parts/0A/two", max_bytes=100) != b"from the parent")
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert backend.get("parts/0A/one", max_bytes=100) == b"from the parent"


def test_close_is_idempotent(backend: Backend) -> None:
    backend.put("parts/0A/one", b"x")
    backend.close()
    backend.close()

"""What every backend promises, tried on each of them."""

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.backend import Backend, Buffer, Created, open_backend, s3
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import finishing
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, MissingObjectError
from tests.servers import ObjectServer, S3Server

MIB = 1 << 20
S3_KINDS = ["moto", pytest.param("seaweedfs", marks=pytest.mark.s3)]
LARGE_BODIES = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs and adlfs do
# Azurite takes seconds to start; GCS's fake takes the same ways through our code
KINDS = ["local", "memory", "fsspec-memory", *S3_KINDS]
KINDS += [pytest.param("gcs", marks=LARGE_BODIES), pytest.param("azure", marks=[LARGE_BODIES, pytest.mark.slow])]


pytestmark = pytest.mark.usefixtures("small_pieces")


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest, tmp_path: Path, place: str) -> Iterator[Backend]:
    """At a location that nobody else uses."""
    match request.param:
        case "local":
            made: Backend = LocalBackend(str(tmp_path / "store"))
        case "memory":
            made = MemoryBackend()
        case "fsspec-memory":
            made = open_backend(f"memory://{place}")
        case "moto":
            made = request.getfixturevalue("direct")
        case kind:
            server: S3Server | ObjectServer = request.getfixturevalue(f"{kind}_server")
            made = open_backend(f"{server.url}/{place}/store", server.storage_options)
    yield made
    made.close()


def on(*kinds: Any) -> pytest.MarkDecorator:
    """On these backends only."""
    return pytest.mark.parametrize("backend", kinds, indirect=True)


def read(backend: Backend, name: str, offset: int, size: int) -> bytes:
    target = bytearray(size)
    backend.read_into(name, offset, memoryview(target))
    return bytes(target)


def names(backend: Backend, prefix: str = "") -> set[str]:
    return {found.name for found in backend.list(prefix)}


def test_a_put_never_writes_over_an_object_and_a_replace_does(backend: Backend) -> None:
    backend.put("parts/0A/one", b"first")
    with pytest.raises(BackendUnavailableError):
        backend.put("parts/0A/one", b"other")
    assert backend.get("parts/0A/one", max_bytes=10) == b"first"
    for data in (b"old and long", b"new"):
        backend.replace("parts/0A/one", data)
        assert backend.get("parts/0A/one", max_bytes=100) == data
    assert names(backend) == {"parts/0A/one"}


def test_put_is_read_back(backend: Backend) -> None:
    bodies: list[Buffer] = [b"", b"x", bytearray(b"abc"), memoryview(b"abcd"), os.urandom(3 * MIB)]
    for number, data in enumerate(bodies):
        name = f"parts/0A/{number}"
        backend.put(name, data)
        assert backend.get(name, max_bytes=len(data)) == data
        assert backend.size(name) == len(data)


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
    assert backend.get_if_there("parts/0A/one", max_bytes=10) == b"x"
    for name in ("parts/0A/two", "nothing/at/all", "parts/0A"):
        assert backend.get_if_there(name, max_bytes=10) is None
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


@pytest.mark.race
def test_of_racing_creates_one_wins(backend: Backend) -> None:
    for name in ("log/1", "log/2"):
        start = threading.Barrier(6)

        def create(number: int, name: str = name, start: threading.Barrier = start) -> Created:
            start.wait()
            return backend.create(name, b"%d" % number)

        with ThreadPoolExecutor(6) as threads:
            outcomes = list(threads.map(create, range(6)))
        assert outcomes.count(Created.CREATED) == 1
        assert backend.get(name, max_bytes=100) == b"%d" % outcomes.index(Created.CREATED)


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


@on(pytest.param("gcs", marks=[LARGE_BODIES, pytest.mark.slow]), pytest.param("seaweedfs", marks=pytest.mark.s3))
def test_list_has_everything_of_a_large_folder(backend: Backend) -> None:
    expected = {f"parts/0A/{number}" for number in range(1005)}
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda name: backend.put(name, b"x"), expected))
    assert names(backend, "parts/") == expected
    backend.delete(expected)
    assert names(backend, "parts/") == set()


def test_listings_and_deletions_of_s3_go_on_after_a_page(direct: S3Backend, direct_client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = direct_client._call_s3

    async def call_for_two(method: str, **arguments: Any) -> Any:
        pages = {"list_objects_v2": {"MaxKeys": 2}, "list_multipart_uploads": {"MaxUploads": 2}}
        return await call(method, **arguments, **pages.get(method, {}))

    monkeypatch.setattr(direct_client, "_call_s3", call_for_two)
    monkeypatch.setattr(s3, "DELETE_BATCH", 2)
    expected = {f"parts/0A/{number}" for number in range(5)}
    for name in expected:
        direct.put(name, b"x")
        direct.begin_upload(name, 6 * MIB)
    assert names(direct, "parts/") == expected
    assert {upload.name.partition("?")[0] for upload in direct.list_uploads()} == expected
    direct.delete(expected)
    assert names(direct, "parts/") == set()


def test_delete_is_idempotent(backend: Backend) -> None:
    backend.put("parts/0A/one", b"x")
    backend.put("parts/0A/two", b"x")
    backend.delete(["parts/0A/one", "parts/0A/never"])
    backend.delete(iter(["parts/0A/one"]))
    backend.delete([])
    assert names(backend) == {"parts/0A/two"}


def write_and_read(backend: Backend, total: int) -> None:
    name, data = f"packs/0A/{total}", memoryview(os.urandom(total))
    writer = backend.open_writer(name)
    for offset in range(0, total, 3 * MIB):
        piece = data[offset : offset + 3 * MIB]
        third = len(piece) // 3
        pieces: list[Buffer] = [bytes(piece[:third]), b"", bytearray(piece[third:])]
        assert writer.append(pieces) == offset
    writer.close()
    assert backend.size(name) == total
    assert read(backend, name, 0, total) == data
    assert list(backend.list_uploads()) == []


def test_writer_keeps_what_was_appended(backend: Backend) -> None:
    for total in (0, 1, 5 * MIB + 1):
        write_and_read(backend, total)


@on(*S3_KINDS)
def test_writer_keeps_what_fills_pieces_and_what_is_more_than_are_sent_at_once(backend: Backend) -> None:
    for total in (5 * MIB - 1, 5 * MIB, 31 * MIB):
        write_and_read(backend, total)


def test_writer_takes_several_threads(backend: Backend) -> None:
    sizes = [random.Random(number).randrange(1, MIB) for number in range(12)]
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


def test_aborted_writer_leaves_nothing_and_a_closed_one_its_object(backend: Backend) -> None:
    for total in (5, 6 * MIB):
        writer = backend.open_writer(f"packs/0A/{total}")
        writer.append([bytes(total)])
        writer.abort()
        writer.abort()
        del writer
        gc.collect()  # adlfs would write an aborted file when it is collected
        assert names(backend) == set()
        assert list(backend.list_uploads()) == []
    writer = backend.open_writer("packs/0A/one")
    writer.append([b"abc"])
    writer.close()
    writer.abort()
    assert backend.get("packs/0A/one", max_bytes=10) == b"abc"


def write_whole(backend: Backend, name: str, data: bytes) -> None:
    with finishing(backend.open_whole_writer(name)) as writer:
        writer.append([data])


@on("local", "memory", "fsspec-memory", *S3_KINDS, pytest.param("azure", marks=[LARGE_BODIES, pytest.mark.slow]))
def test_a_whole_writer_replaces_and_deletes_nothing(backend: Backend) -> None:
    """Another process may be writing the same object, or have published it. GCS's fake ignores the condition of an upload session."""
    name = "packs/0A/one"
    write_whole(backend, name, b"abc")
    with pytest.raises(BackendUnavailableError):
        write_whole(backend, name, b"other")
    with suppress(BackendUnavailableError):
        backend.open_whole_writer(name).abort()
    assert backend.get(name, max_bytes=10) == b"abc"
    assert names(backend) == {name}
    assert list(backend.list_uploads()) == []


@on("memory", *S3_KINDS)
def test_unfinished_upload_is_found_and_freed(backend: Backend) -> None:
    backend.open_writer("packs/0A/left").append([bytes(6 * MIB)])
    assert names(backend) == set()
    (upload,) = backend.list_uploads()
    assert upload.name.startswith("packs/0A/left")
    assert upload.modified_ns > 0  # moto gives every upload the same date
    assert [list(backend.list_uploads(folders)) for folders in (["packs"], ["log"])] == [[upload], []]
    backend.abort_upload(upload.name)
    assert list(backend.list_uploads()) == []
    backend.abort_upload(upload.name)


def test_folders_at_the_root(backend: Backend) -> None:
    for name in ("log", "log-1/a/b", "logs/a", "packs/log/a"):
        backend.put(name, b"x")
    assert set(backend.folders("log")) == {"log-1", "logs"}
    assert not backend.folders("parts")


BAD_NAMES = ["", "/", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a/.tmp-1", ".hidden", "a\0b", "a\nb", "ä", "a b", "x" * 513]


def test_names_and_prefixes_that_could_leave_the_store_are_refused(backend: Backend) -> None:
    attempts: list[Callable[[str], object]] = [
        lambda name: backend.get(name, max_bytes=1),
        lambda name: backend.get_if_there(name, max_bytes=1),
        backend.size,
        lambda name: read(backend, name, 0, 1),
        lambda name: backend.put(name, b""),
        lambda name: backend.create(name, b""),
        lambda name: backend.replace(name, b""),
        backend.open_writer,
        lambda name: backend.delete([name]),
        backend.sync_folders,
    ]
    for name in BAD_NAMES:
        for attempt in attempts:
            with pytest.raises(CorruptObjectError):
                attempt(name)
    for prefix in ("..", "../", "a", "/", "a/../", "a//"):
        with pytest.raises(CorruptObjectError):
            list(backend.list(prefix))


@on("local", "memory", "fsspec-memory", *KINDS[-2:])
def test_a_forked_child_can_use_it(backend: Backend) -> None:
    """On S3: tests/end_to_end/test_s3.py."""
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

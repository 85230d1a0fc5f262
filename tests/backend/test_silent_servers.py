"""A server of Google Cloud Storage or Azure that takes connections and never answers: an error within the patience, whatever is asked.

S3's requests are in `test_s3_requests`.
"""

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any, Final

import pytest
from fsspec.asyn import get_loop
from fsspec.implementations.memory import MemoryFile

from tensorstore_ck.backend import Created, fsspec_backend, open_backend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.wait_notices import WaitNotices
from tensorstore_ck.errors import BackendUnavailableError
from tests.backend.chaos import silent_server

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")  # gcsfs and adlfs do
SHORT_SECONDS: Final = 0.05


def write(backend: Backend, size_bytes: int) -> None:
    writer = backend.open_writer("a/b")
    try:
        writer.append([bytes(size_bytes)])
        writer.close()
    finally:
        writer.abort()


CALLS: Final[dict[str, Callable[[Backend], object]]] = {
    "get": lambda backend: backend.get("a/b", max_bytes=1),
    "read": lambda backend: backend.read_into("a/b", 0, memoryview(bytearray(9))),
    "size": lambda backend: backend.size("a/b"),
    "list": lambda backend: list(backend.list("a/")),
    "folders": lambda backend: backend.folders("a"),
    "put": lambda backend: backend.put("a/b", b"body"),
    "a body that is not taken": lambda backend: backend.put("a/b", bytes(16 << 20)),
    "replace": lambda backend: backend.replace("a/b", b"body"),
    "delete": lambda backend: backend.delete(["a/b"]),
    "write": lambda backend: write(backend, 1),
    "write pieces": lambda backend: write(backend, 6 << 20),
}


def gcs_options(endpoint: str) -> dict[str, Any]:
    return {"endpoint_url": endpoint, "token": "anon"}


def azure_options(endpoint: str) -> dict[str, Any]:
    return {"connection_string": f"DefaultEndpointsProtocol=http;AccountName=a;AccountKey=a2V5;BlobEndpoint={endpoint}/a;"}


@pytest.fixture(params=[("gs", "gcsfs", gcs_options), ("az", "adlfs", azure_options)], ids=["gcs", "azure"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    protocol, library, options_of = request.param
    pytest.importorskip(library)
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    monkeypatch.setattr(fsspec_backend, "PATIENCE_SECONDS", SHORT_SECONDS)
    monkeypatch.setattr(fsspec_backend, "LISTING_PATIENCE", 1)
    monkeypatch.setattr(fsspec_backend, "WaitNotices", partial(WaitNotices, notice_seconds=SHORT_SECONDS / 5))
    monkeypatch.setattr(fsspec_backend, "SLOWEST_BYTES_PER_SECOND", 1 << 40)
    with silent_server() as endpoint:
        yield open_backend(f"{protocol}://bucket/x", options_of(endpoint))
        for task in asyncio.all_tasks(get_loop()):
            get_loop().call_soon_threadsafe(task.cancel)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_and_says_before_that_it_waits(silent: Backend, call: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(BackendUnavailableError, match=r"no answer within 0.05 s \(TimeoutError\); check the connection") as caught:
        CALLS[call](silent)
    assert silent.url in str(caught.value)
    assert f" in {silent.url} (try 1)" in caplog.text, "said before"


def test_a_create_is_undecided(silent: Backend) -> None:
    assert silent.create("a/b", b"body") is Created.UNKNOWN


@pytest.mark.parametrize("is_timeout", [False, True])
def test_an_error_keeps_no_view_of_what_was_written(monkeypatch: pytest.MonkeyPatch, is_timeout: bool) -> None:
    """As `getbuffer` in gcsfs: Python 3.12 crashes when it collects a buffer and a view of it in one cycle."""
    kept = BytesIO(bytes(10))

    def send() -> None:
        view = kept.getbuffer()
        raise OSError(len(view))

    def write(_: object, data: object) -> int:
        try:
            send()
        except OSError as exc:
            cause = exc
        if is_timeout:
            raise TimeoutError from cause  # outside `except`, as fsspec does
        raise cause

    writer = open_backend("memory://an-error-keeps-no-view").open_writer("a/b")
    monkeypatch.setattr(MemoryFile, "write", write)
    with pytest.raises(BackendUnavailableError) as caught:
        writer.append([b"x"])
    kept.truncate(0)
    assert "a/b" in str(caught.value)

"""Uploads to S3 servers, through a proxy that does what networks do: resumed, resolved, started over."""

import random
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tensorstore_ck.backend import s3_multipart_writer
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.s3_requests import RetryTiming
from tensorstore_ck.backend.staging import StagingFolder, Uploader
from tensorstore_ck.errors import PermissionDeniedError
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy, first
from tests.backend.staging.places import PACK, PART, held, staging
from tests.servers import BUCKET, S3Server, storage_options

MIB = 1 << 20
OBJECTS = {PACK: random.Random(1).randbytes(11 * MIB), PART: b"part" * 75}
MORE_THAN_ONE_REQUEST_IS_TRIED = 5
ONE_TRY = {"retries": {"total_max_attempts": 1}}
STEPS = [("POST", "?uploads"), ("PUT", "partNumber=1"), ("PUT", "partNumber=3"), ("POST", "uploadId="), ("PUT", PART.rpartition("/")[2])]


class Killed(BaseException):
    pass


@pytest.fixture(scope="module")
def moto_proxy(moto_server: S3Server) -> Iterator[ChaosProxy]:
    with chaos_proxy(moto_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def filesystem(moto_proxy: ChaosProxy) -> Any:
    return connect(moto_proxy.url)


@pytest.fixture
def proxy(moto_proxy: ChaosProxy) -> Iterator[ChaosProxy]:
    yield moto_proxy
    moto_proxy.plan = lambda _: Fault.NONE
    moto_proxy.seen.clear()


@pytest.fixture
def store(proxy: ChaosProxy, filesystem: Any) -> S3Backend:
    return S3Backend(lambda: filesystem, BUCKET, str(uuid.uuid4()), timing=RetryTiming(max_tries=2))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 * MIB)  # the smallest that S3 takes


def connect(endpoint: str) -> Any:
    return s3fs.S3FileSystem(**storage_options(endpoint), config_kwargs=ONE_TRY, use_listings_cache=False, skip_instance_cache=True)


def uploader(folder: StagingFolder, store: S3Backend, requests: int = 3) -> Uploader:
    return Uploader(folder, store, max_parallel_requests=requests, sleep=lambda _: None)


def interrupt(folder: StagingFolder, store: S3Backend) -> None:
    """Stops when two pieces have been sent."""
    sent: list[int] = []

    def stop() -> None:
        if len(sent) == 2:
            raise Killed

    with pytest.raises(Killed):
        uploader(folder, store, 1).upload(OBJECTS, stop=stop, on_bytes=sent.append)


def count(proxy: ChaosProxy, marker: str) -> int:
    return sum(marker in request.path for request in proxy.seen if request.method == "PUT")


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.STATUS_503])
def test_faults_pass(tmp_path: Path, store: S3Backend, proxy: ChaosProxy, fault: Fault) -> None:
    plans = [first(MORE_THAN_ONE_REQUEST_IS_TRIED, fault, *step) for step in STEPS]
    proxy.plan = lambda request: next((found for plan in plans if (found := plan(request)) is not Fault.NONE), Fault.NONE)
    uploader(staging(tmp_path, OBJECTS), store).upload(OBJECTS)
    proxy.plan = lambda _: Fault.NONE
    assert held(store) == OBJECTS


def test_a_completion_without_any_reply_is_settled_by_looking(tmp_path: Path, store: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(1000, Fault.LOSE_REPLY, "POST", "uploadId=")
    uploader(staging(tmp_path, OBJECTS), store).upload(OBJECTS)
    assert held(store) == OBJECTS


def test_no_piece_is_sent_twice(tmp_path: Path, store: S3Backend, proxy: ChaosProxy) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, store)
    assert count(proxy, "partNumber=") == 2
    uploader(staging(tmp_path, {}), store).upload(OBJECTS)
    assert held(store) == OBJECTS
    assert count(proxy, "partNumber=") == 3
    assert not list(store.list_uploads())


def test_an_upload_that_somebody_aborted_starts_over(tmp_path: Path, store: S3Backend) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, store)
    for upload in list(store.list_uploads()):
        store.abort_upload(upload.name)
    uploader(folder, store).upload(OBJECTS)
    assert held(store) == OBJECTS


def test_a_completion_that_was_not_noted_is_found(tmp_path: Path, store: S3Backend, proxy: ChaosProxy) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, store)
    entry = folder.journal.read(PACK)
    assert entry is not None
    uploader(folder, store).upload(OBJECTS)
    folder.journal.write(entry)
    sent = count(proxy, "")
    uploader(folder, store).upload(OBJECTS)
    assert count(proxy, "") == sent


def test_drop_aborts(tmp_path: Path, store: S3Backend) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, store)
    assert list(store.list_uploads())
    uploader(folder, store).drop(OBJECTS)
    assert not list(store.list_uploads())


def test_a_refusal_is_not_retried(tmp_path: Path, store: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = lambda _: Fault.STATUS_403
    with pytest.raises(PermissionDeniedError):
        uploader(staging(tmp_path, OBJECTS), store).upload(OBJECTS)


@pytest.mark.s3
def test_a_real_server(seaweedfs_server: S3Server, tmp_path: Path) -> None:
    with chaos_proxy(seaweedfs_server.port) as proxy:
        filesystem = connect(proxy.url)
        store = S3Backend(lambda: filesystem, BUCKET, str(uuid.uuid4()), timing=RetryTiming(max_tries=2))
        folder = staging(tmp_path, OBJECTS)
        interrupt(folder, store)
        entry = folder.journal.read(PACK)
        uploader(folder, store).upload(OBJECTS)
        assert held(store) == OBJECTS
        assert count(proxy, "partNumber=") == 3
        assert entry is not None
        folder.journal.write(entry)  # the upload is unknown now, and the object there
        uploader(folder, store).upload(OBJECTS)
        assert count(proxy, "partNumber=") == 3
        store.delete(OBJECTS)
        folder.journal.write(entry)  # neither is there
        uploader(folder, store).upload(OBJECTS)
        assert held(store) == OBJECTS
        store.close()

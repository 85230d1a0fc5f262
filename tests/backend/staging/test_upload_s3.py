"""Uploads to S3 servers, through a proxy that does what networks do: resumed, resolved, started over."""

import random
from pathlib import Path

import pytest

from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.s3_requests import RetryTiming
from tensorstore_ck.backend.staging import StagingFolder, Uploader
from tensorstore_ck.errors import PermissionDeniedError
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy, first
from tests.backend.conftest import TRIES, connect
from tests.backend.staging.places import PACK, PART, held, staging
from tests.servers import BUCKET, S3Server

MIB = 1 << 20
OBJECTS = {PACK: random.Random(1).randbytes(11 * MIB), PART: b"part" * 75}
MORE_THAN_ONE_OPERATION_TRIES = TRIES + 1
pytestmark = pytest.mark.usefixtures("small_pieces")
STEPS = [("POST", "?uploads"), ("PUT", "partNumber=1"), ("PUT", "partNumber=3"), ("POST", "uploadId="), ("PUT", PART.rpartition("/")[2])]


class Killed(BaseException):
    pass


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


@pytest.mark.slow
def test_faults_pass(tmp_path: Path, backend: S3Backend, proxy: ChaosProxy) -> None:
    faults = [Fault.LOSE_REQUEST, Fault.LOSE_REPLY, Fault.STATUS_503, Fault.LOSE_REPLY, Fault.LOSE_REPLY]
    plans = [first(MORE_THAN_ONE_OPERATION_TRIES, fault, *step) for fault, step in zip(faults, STEPS, strict=True)]
    proxy.plan = lambda request: next((found for plan in plans if (found := plan(request)) is not Fault.NONE), Fault.NONE)
    uploader(staging(tmp_path, OBJECTS), backend).upload(OBJECTS)
    proxy.plan = lambda _: Fault.NONE
    assert held(backend) == OBJECTS


def test_no_piece_is_sent_twice(tmp_path: Path, backend: S3Backend, proxy: ChaosProxy) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, backend)
    assert count(proxy, "partNumber=") == 2
    uploader(staging(tmp_path, {}), backend).upload(OBJECTS)
    assert held(backend) == OBJECTS
    assert count(proxy, "partNumber=") == 3
    assert not list(backend.list_uploads())


def test_an_upload_that_somebody_aborted_starts_over(tmp_path: Path, backend: S3Backend) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, backend)
    for upload in list(backend.list_uploads()):
        backend.abort_upload(upload.name)
    uploader(folder, backend).upload(OBJECTS)
    assert held(backend) == OBJECTS


def test_a_completion_that_was_not_noted_is_found(tmp_path: Path, backend: S3Backend, proxy: ChaosProxy) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, backend)
    entry = folder.journal.read(PACK)
    assert entry is not None
    uploader(folder, backend).upload(OBJECTS)
    folder.journal.write(entry)
    sent = count(proxy, "")
    uploader(folder, backend).upload(OBJECTS)
    assert count(proxy, "") == sent


def test_drop_aborts(tmp_path: Path, backend: S3Backend) -> None:
    folder = staging(tmp_path, OBJECTS)
    interrupt(folder, backend)
    assert list(backend.list_uploads())
    uploader(folder, backend).drop(OBJECTS)
    assert not list(backend.list_uploads())


def test_a_refusal_is_not_retried(tmp_path: Path, backend: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = lambda _: Fault.STATUS_403
    with pytest.raises(PermissionDeniedError):
        uploader(staging(tmp_path, OBJECTS), backend).upload(OBJECTS)


@pytest.mark.s3
def test_a_real_server(seaweedfs_server: S3Server, place: str, tmp_path: Path) -> None:
    with chaos_proxy(seaweedfs_server.port) as proxy:
        filesystem = connect(proxy.url)
        store = S3Backend(lambda: filesystem, BUCKET, place, timing=RetryTiming(max_tries=2))
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

"""S3 when replies get lost, requests never arrive and servers refuse: nothing that was written is reported as not written."""

import contextlib
import os
import random
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import s3fs

from tensorstore_ck.backend import Created, open_backend, s3_multipart_writer
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.s3_requests import RetryTiming
from tensorstore_ck.errors import (
    BackendUnavailableError,
    InvalidOptionError,
    InvalidUrlError,
    MissingObjectError,
    PermissionDeniedError,
    StoreError,
    UnsafeBackendError,
)
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy, first, once
from tests.servers import BUCKET, S3Server, refusing_port, storage_options

MIB = 1 << 20
MANY = 1000
ONE_TRY = {"retries": {"total_max_attempts": 1}}
"""Of botocore's."""
FEW_TRIES = {"retries": {"max_attempts": 1}}
TWICE = RetryTiming(max_tries=2)


@pytest.fixture(scope="module")
def proxied(moto_server: S3Server) -> Iterator[ChaosProxy]:
    with chaos_proxy(moto_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxied: ChaosProxy) -> Iterator[ChaosProxy]:
    yield proxied
    proxied.plan = lambda _: Fault.NONE
    proxied.seen.clear()


@pytest.fixture
def place() -> str:
    """A prefix that nobody else uses."""
    return str(uuid.uuid4())


@pytest.fixture(scope="module")
def direct_filesystem(moto_server: S3Server) -> s3fs.S3FileSystem:
    return connect(moto_server.endpoint)


@pytest.fixture(scope="module")
def proxied_filesystem(proxied: ChaosProxy) -> s3fs.S3FileSystem:
    return connect(proxied.url)


@pytest.fixture
def direct(direct_filesystem: s3fs.S3FileSystem, place: str) -> Backend:
    """The same store, past the proxy."""
    return S3Backend(lambda: direct_filesystem, BUCKET, place)


@pytest.fixture
def backend(proxy: ChaosProxy, proxied_filesystem: s3fs.S3FileSystem, place: str) -> Backend:
    """A store behind the proxy; making a client takes longer than most tests, so it is shared."""
    return S3Backend(lambda: proxied_filesystem, BUCKET, place, timing=TWICE)


def connect(endpoint: str) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(**storage_options(endpoint), config_kwargs=ONE_TRY, use_listings_cache=False, skip_instance_cache=True)


def read(backend: Backend, name: str, size: int) -> bytes:
    target = bytearray(size)
    backend.read_into(name, 0, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("times", [1, MANY])
def test_a_create_whose_reply_was_lost_is_no_failure(backend: Backend, direct: Backend, proxy: ChaosProxy, times: int) -> None:
    proxy.plan = first(times, Fault.LOSE_REPLY, "PUT")
    assert backend.create("log/1", b"mine") in (Created.EXISTS, Created.UNKNOWN)
    assert direct.get("log/1", max_bytes=100) == b"mine"


def test_a_create_that_may_not_have_arrived_is_unknown(backend: Backend, direct: Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(MANY, Fault.LOSE_REQUEST, "PUT")
    assert backend.create("log/1", b"mine") is Created.UNKNOWN
    with pytest.raises(MissingObjectError):
        direct.get("log/1", max_bytes=100)


@pytest.mark.parametrize(
    ("fault", "outcome"), [(Fault.STATUS_409, Created.UNKNOWN), (Fault.STATUS_412, Created.EXISTS), (Fault.STATUS_503, Created.UNKNOWN)]
)
def test_create_goes_by_the_http_status(backend: Backend, proxy: ChaosProxy, fault: Fault, outcome: Created) -> None:
    proxy.plan = first(MANY, fault, "PUT")
    assert backend.create("log/1", b"mine") is outcome


def test_a_server_without_conditional_writes_is_refused(backend: Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(MANY, Fault.STATUS_501, "PUT")
    with pytest.raises(UnsafeBackendError):
        backend.create("log/1", b"mine")


def test_a_botocore_without_conditional_writes_is_refused() -> None:
    model = SimpleNamespace(input_shape=SimpleNamespace(members={"Bucket": None, "Key": None, "Body": None}))
    service = SimpleNamespace(operation_model=lambda _: model)
    filesystem = SimpleNamespace(s3=SimpleNamespace(meta=SimpleNamespace(service_model=service)))
    with pytest.raises(UnsafeBackendError, match="pip install"):
        S3Backend(lambda: filesystem, BUCKET, "x").create("log/1", b"mine")


def test_create_is_one_request(backend: Backend, proxy: ChaosProxy) -> None:
    backend.create("log/1", bytes(3 * MIB))
    assert [(request.method, request.path.rpartition("/")[2]) for request in proxy.seen] == [("PUT", "1")]


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.STATUS_503])
@pytest.mark.parametrize("size", [1, 3 * MIB])
def test_a_repeated_put_sends_the_whole_body(backend: Backend, direct: Backend, proxy: ChaosProxy, fault: Fault, size: int) -> None:
    body = os.urandom(size)
    proxy.plan = once(fault, "PUT")
    backend.put("parts/0A/one", body)
    assert direct.get("parts/0A/one", max_bytes=size) == body
    methods = [request.method for request in proxy.seen]
    assert methods == (["PUT", "PUT", "HEAD"] if fault is Fault.LOSE_REPLY else ["PUT", "PUT"]), (
        "the second is refused, and settled by a look"
    )


@pytest.mark.parametrize("times", [2, 4])
def test_nobody_repeats_a_put_with_what_is_left_of_its_body(backend: Backend, direct: Backend, proxy: ChaosProxy, times: int) -> None:
    """The body is rewound before it is sent again, by aiohttp too; s3fs would not."""
    proxy.plan = first(times, Fault.LOSE_REPLY, "PUT")
    with contextlib.suppress(BackendUnavailableError):
        backend.put("parts/0A/one", b"body")
    assert direct.get("parts/0A/one", max_bytes=10) == b"body"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 * MIB)  # the smallest that S3 takes


def write_pack(backend: Backend, body: bytes) -> None:
    writer = backend.open_writer("packs/0A/one")
    try:
        for offset in range(0, len(body), 3 * MIB):
            writer.append([body[offset : offset + 3 * MIB]])
        writer.close()
    except BaseException:
        writer.abort()
        raise


STEPS = [("POST", "?uploads"), ("PUT", "partNumber=1"), ("PUT", "partNumber=3"), ("POST", "uploadId=")]


@pytest.mark.parametrize("fault", [Fault.LOSE_REPLY, Fault.LOSE_REQUEST, Fault.STATUS_503])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_an_upload_survives_one_fault(backend: Backend, direct: Backend, proxy: ChaosProxy, fault: Fault, step: tuple[str, str]) -> None:
    body = random.Random(1).randbytes(12 * MIB)
    proxy.plan = once(fault, *step)
    write_pack(backend, body)
    assert read(direct, "packs/0A/one", len(body)) == body


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_an_upload_that_cannot_go_on_fails_and_is_aborted(
    backend: Backend, direct: Backend, proxy: ChaosProxy, step: tuple[str, str]
) -> None:
    proxy.plan = first(MANY, Fault.STATUS_503, *step)
    with pytest.raises(BackendUnavailableError):
        write_pack(backend, bytes(12 * MIB))
    assert list(direct.list("")) == []
    assert list(direct.list_uploads()) == []


def test_a_completion_whose_replies_are_all_lost_is_settled_by_looking(backend: Backend, direct: Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(MANY, Fault.LOSE_REPLY, "POST", "uploadId=")
    write_pack(backend, bytes(7 * MIB))
    assert direct.size("packs/0A/one") == 7 * MIB


def test_a_reply_that_breaks_off_is_asked_for_again(backend: Backend, proxy: ChaosProxy) -> None:
    body = os.urandom(2 * MIB)
    backend.put("packs/0A/one", body)
    proxy.plan = once(Fault.CUT_BODY, "GET")
    assert read(backend, "packs/0A/one", len(body)) == body
    proxy.plan = once(Fault.CUT_BODY, "GET")
    assert backend.get("packs/0A/one", max_bytes=len(body)) == body


def test_replies_that_always_break_off_are_an_error(backend: Backend, proxy: ChaosProxy) -> None:
    backend.put("packs/0A/one", b"12345678")
    proxy.plan = first(MANY, Fault.CUT_BODY, "GET")
    with pytest.raises(BackendUnavailableError) as caught:
        read(backend, "packs/0A/one", 8)
    assert caught.value.object_id == "packs/0A/one"


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.STATUS_503])
def test_what_does_not_pass_is_unavailable(backend: Backend, proxy: ChaosProxy, fault: Fault) -> None:
    def plan(_: object) -> Fault:
        return fault

    proxy.plan = plan
    for attempt in (
        lambda: backend.get("a/b", max_bytes=1),
        lambda: backend.put("a/b", b"x"),
        lambda: list(backend.list("")),
        lambda: backend.delete(["a/b"]),
    ):
        with pytest.raises(BackendUnavailableError):
            attempt()


def test_no_bucket_is_an_invalid_url(moto_server: S3Server) -> None:
    backend = open_backend("s3://nobody-made-this/x", moto_server.storage_options)
    for attempt in (lambda: backend.get("a/b", max_bytes=1), lambda: backend.put("a/b", b"x"), lambda: list(backend.list(""))):
        with pytest.raises(InvalidUrlError, match="bucket"):
            attempt()
    backend.close()


def test_nobody_listens() -> None:
    with refusing_port() as port:
        backend = open_backend("s3://bucket/x", {**storage_options(f"http://127.0.0.1:{port}"), "config_kwargs": FEW_TRIES})
        with pytest.raises(BackendUnavailableError):
            backend.get("a/b", max_bytes=1)
        assert backend.create("a/b", b"x") is Created.UNKNOWN
        backend.close()


def test_options_that_botocore_does_not_take(moto_server: S3Server) -> None:
    backend = open_backend("s3://bucket/x", {**moto_server.storage_options, "no_such_option": 1})
    with pytest.raises(InvalidOptionError, match="no_such_option"):
        backend.get("a/b", max_bytes=1)
    backend.close()


@pytest.mark.s3
@pytest.mark.parametrize("wrong", [{"secret": "wrong"}, {"key": "nobody"}])
def test_wrong_credentials_are_denied(seaweedfs_server: S3Server, wrong: dict[str, str]) -> None:
    backend = open_backend(f"s3://{BUCKET}/x", {**seaweedfs_server.storage_options, **wrong})
    for attempt in (
        lambda: backend.get("a/b", max_bytes=1),
        lambda: backend.put("a/b", b"x"),
        lambda: backend.create("a/b", b"x"),
        lambda: list(backend.list("")),
    ):
        with pytest.raises(PermissionDeniedError):
            attempt()
    backend.close()


@pytest.mark.s3
@pytest.mark.parametrize("times", [1, MANY])
def test_lost_replies_on_a_real_server(seaweedfs_server: S3Server, place: str, times: int) -> None:
    with chaos_proxy(seaweedfs_server.port) as proxy:
        backend = open_backend(f"s3://{BUCKET}/{place}", {**storage_options(proxy.url), "config_kwargs": FEW_TRIES})
        proxy.plan = first(times, Fault.LOSE_REPLY, "PUT", "log")
        outcome = backend.create("log/1", b"mine")
        assert outcome in (Created.EXISTS, Created.UNKNOWN)
        assert backend.get("log/1", max_bytes=10) == b"mine"
        proxy.plan = once(Fault.LOSE_REPLY, "POST", "uploadId=")
        write_pack(backend, bytes(7 * MIB))
        assert backend.size("packs/0A/one") == 7 * MIB
        backend.close()


def test_every_error_is_ours(backend: Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(MANY, Fault.CUT_BODY, "GET")  # listings whose XML ends in the middle
    backend.put("a/b", b"x")
    with pytest.raises(StoreError):
        list(backend.list(""))

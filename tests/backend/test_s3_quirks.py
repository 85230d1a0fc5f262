"""S3 servers that do not support all of S3, and accounts with special states: handled, or one error with the right advice."""

from collections.abc import Callable

import pytest

from tensorstore_ck.backend import Created
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.engine.opening import init_store
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError, PermissionDeniedError, StoreError, UnsafeBackendError
from tests.backend.chaos import ChaosProxy, Fault, Request
from tests.backend.conftest import connect
from tests.log.scripted import append_puts, open_log
from tests.servers import BUCKET

Refused = Callable[[Request], bool]


def answer(proxy: ChaosProxy, status: int, code: str, message: str, refused: Refused) -> None:
    """From now on, requests that `refused` chooses get this reply, and nothing is done."""
    proxy.answer = (status, f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode())
    proxy.plan = lambda request: Fault.ANSWER if refused(request) else Fault.NONE
    proxy.seen.clear()


def has_header(start: str) -> Refused:
    return lambda request: any(name.lower().startswith(start) for name in request.headers)


def seen(proxy: ChaosProxy) -> str:
    return " ".join(request.method for request in proxy.seen)


@pytest.mark.parametrize(
    ("status", "code"), [(501, "NotImplemented"), (405, "MethodNotAllowed"), (400, "MissingContentMD5"), (400, "InvalidArgument")]
)
def test_without_batches_objects_are_deleted_one_by_one(backend: S3Backend, proxy: ChaosProxy, status: int, code: str) -> None:
    for name in "abc":
        backend.put(f"packs/{name}", b"x")
    answer(proxy, status, code, "refused", lambda request: request.method == "POST")
    backend.delete(["packs/a", "packs/b", "packs/none"])
    assert [info.name for info in backend.list("")] == ["packs/c"]
    backend.delete(["packs/c"])
    assert seen(proxy) == "POST DELETE DELETE DELETE GET DELETE", "a batch is tried once"


CHECKSUM_REFUSALS = [
    (501, "NotImplemented", "Header 'x-amz-checksum-crc32' with value '***' not implemented"),
    (400, "InvalidArgument", "Unsupported header 'x-amz-sdk-checksum-algorithm' received for this API call."),
    (501, "NotImplemented", "A header you provided implies functionality that is not implemented"),
]


@pytest.mark.parametrize(("status", "code", "message"), CHECKSUM_REFUSALS)
def test_where_checksums_are_refused_requests_go_without(proxy: ChaosProxy, place: str, status: int, code: str, message: str) -> None:
    backend = S3Backend(lambda: connect(proxy.url), BUCKET, place)
    answer(proxy, status, code, message, lambda request: has_header("x-amz-checksum")(request) or has_header("x-amz-sdk-ch")(request))
    assert backend.create("log/one", b"mine") is Created.CREATED
    assert backend.create("log/one", b"other") is Created.EXISTS
    backend.put("packs/a", b"data")
    assert backend.get("packs/a", max_bytes=10) == b"data"
    assert seen(proxy) == "PUT PUT PUT PUT GET", "only the first request is refused"
    backend.delete(["packs/a"])  # a batch must have a checksum
    assert [info.name for info in backend.list("")] == ["log/one"]
    backend.close()


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (400, "NotImplemented", "A header you provided implies functionality that is not implemented: If-None-Match"),
        (400, "InvalidArgument", "Unsupported header If-None-Match"),
        (405, "MethodNotAllowed", "The specified method is not allowed"),
        (501, "NotImplemented", "A header you provided implies functionality that is not implemented"),
    ],
)
def test_without_the_condition_no_commit_is_made_but_packs_are(
    backend: S3Backend, proxy: ChaosProxy, status: int, code: str, message: str
) -> None:
    answer(proxy, status, code, message, has_header("if-none-match"))
    with pytest.raises(UnsafeBackendError, match="does not support conditional writes"):
        backend.create("log/one", b"mine")
    with pytest.raises(UnsafeBackendError, match=r"could be lost: .* does not support conditional writes"):
        init_store(backend)
    backend.put("packs/a", b"data")
    assert [info.name for info in backend.list("")] == ["packs/a"]


@pytest.mark.parametrize(
    "refusal",
    [
        (400, "AuthorizationHeaderMalformed", InvalidOptionError, "region_name"),
        (400, "ExpiredToken", PermissionDeniedError, "new credentials"),
        (403, "RequestTimeTooSkewed", PermissionDeniedError, "this host's clock"),
        (403, "InvalidObjectState", PermissionDeniedError, "restore-object"),
        (400, "XMinioAdminBucketQuotaExceeded", NoSpaceError, "quota raised"),
        (400, "XMinioInvalidObjectName", PermissionDeniedError, "no backslash"),
        (400, "EntityTooLarge", PermissionDeniedError, "the server refuses this request"),
    ],
)
def test_a_refusal_has_the_advice_that_helps_and_is_sent_once(
    backend: S3Backend, proxy: ChaosProxy, refusal: tuple[int, str, type[StoreError], str]
) -> None:
    status, code, error, advice = refusal
    answer(proxy, status, code, "refused", lambda request: True)
    acts = (lambda: backend.get("packs/a", max_bytes=9), lambda: backend.put("packs/a", b"x"), lambda: backend.create("log/1", b"x"))
    for act in acts:
        with pytest.raises(error, match=advice):
            act()
    assert seen(proxy) == "GET PUT PUT"


def test_a_refused_log_entry_is_a_refusal_at_once(backend: S3Backend, proxy: ChaosProxy) -> None:
    """Not an unknown outcome, after which the log would be read for 100 s."""
    log = open_log(backend)
    append_puts(log, 1)
    answer(proxy, 400, "InvalidRequest", "refused", lambda request: request.method == "PUT")
    with pytest.raises(PermissionDeniedError, match="the server refuses this request"):
        append_puts(log, 1, first=1)
    assert seen(proxy).count("PUT") == 1
    proxy.plan = lambda _: Fault.NONE
    append_puts(log, 1, first=1)
    assert log.sync().n == 2, "the handle goes on"

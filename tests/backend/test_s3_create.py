"""Objects on S3 are created, never written over; and what a 412 means is found out with one HEAD."""

import io
from typing import Any

import pytest

from tensorstore_ck.backend.protocol import writing
from tensorstore_ck.backend.resumable_upload import NameTakenError
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.errors import BackendUnavailableError
from tests.backend.chaos import ChaosProxy, Fault, first, once
from tests.backend.s3policies import accesses

MIB = 1 << 20
NAME = "packs/0A/01ARZ3NDEKTSV4RRFFQ69G5F0A"
SMALL, LARGE = b"mine" * 100, b"mine" * (3 * MIB // 2)
BODIES = pytest.mark.parametrize("body", [SMALL, LARGE], ids=["put", "upload"])
pytestmark = pytest.mark.usefixtures("small_pieces")


def write(backend: S3Backend, body: bytes) -> None:
    with writing(backend, NAME) as writer:
        writer.append([body])


def seen(proxy: ChaosProxy) -> str:
    return " ".join(request.method for request in proxy.seen if NAME in request.path)


def conditions(proxy: ChaosProxy) -> list[str]:
    """Of the requests that make an object."""
    return [access.context.get("s3:if-none-match", "-") for request in proxy.seen for access in accesses(request) if access.creates]


@BODIES
def test_an_object_is_created_with_as_many_requests_as_it_needs(backend: S3Backend, proxy: ChaosProxy, body: bytes) -> None:
    write(backend, body)
    assert seen(proxy) == ("PUT" if body is SMALL else "POST PUT PUT POST")
    assert conditions(proxy) == ["*"]


@BODIES
@pytest.mark.parametrize("there", [b"another's", SMALL, LARGE], ids=["other size", "small", "large"])
def test_an_object_is_never_written_over(backend: S3Backend, body: bytes, there: bytes) -> None:
    """Not even one of the same bytes is taken for what was sent."""
    write(backend, there)
    with pytest.raises(BackendUnavailableError, match=r"an object of that name exists.* with a new name"):
        write(backend, body)
    assert backend.get(NAME, max_bytes=len(there)) == there
    assert not list(backend.list_uploads())


def test_what_is_replaced_is(backend: S3Backend, proxy: ChaosProxy) -> None:
    backend.put("store.json", b"first")
    backend.replace("store.json", b"second")
    assert backend.get("store.json", max_bytes=10) == b"second"
    assert conditions(proxy) == ["*", "-"]


@BODIES
def test_an_own_success_behind_a_412_is_settled_without_a_read(backend: S3Backend, proxy: ChaosProxy, body: bytes) -> None:
    method, marker = ("PUT", NAME) if body is SMALL else ("POST", "?uploadId=")
    proxy.plan = first(3, Fault.LOSE_REPLY, method, marker)
    write(backend, body)
    assert "GET" not in seen(proxy)
    assert seen(proxy).endswith("HEAD")
    assert backend.size(NAME) == len(body)


@BODIES
def test_an_own_success_behind_a_412_on_the_first_try(backend: S3Backend, proxy: ChaosProxy, body: bytes) -> None:
    """As when a connection's library sends a request twice by itself."""
    proxy.plan = once(Fault.REPLY_412, "PUT" if body is SMALL else "POST", NAME if body is SMALL else "?uploadId=")
    write(backend, body)
    assert seen(proxy).endswith("HEAD")
    assert backend.get(NAME, max_bytes=len(body)) == body


@BODIES
def test_a_lost_reply_does_not_make_anothers_object_ones_own(backend: S3Backend, proxy: ChaosProxy, body: bytes) -> None:
    write(backend, bytes(len(body)))
    proxy.plan = once(Fault.LOSE_REPLY, "PUT" if body is SMALL else "POST", NAME if body is SMALL else "?uploadId=")
    with pytest.raises(BackendUnavailableError):
        write(backend, body)
    assert backend.get(NAME, max_bytes=len(body)) == bytes(len(body))


@BODIES
def test_a_server_that_does_not_know_the_condition_is_asked_once(backend: S3Backend, proxy: ChaosProxy, body: bytes) -> None:
    def plan(request: Any) -> Fault:
        return Fault.STATUS_501 if any(name.lower() == "if-none-match" for name in request.headers) else Fault.NONE

    proxy.plan = plan
    write(backend, body)
    assert backend.get(NAME, max_bytes=len(body)) == body
    backend.delete([NAME])
    write(backend, body)
    assert conditions(proxy) == ["*", "-", "-"]


# --- uploads that another process goes on with ------------------------------------------------------------------------------


def send(backend: S3Backend, body: bytes, token: str = "") -> str:
    upload = backend.resume_upload(NAME, len(body), token) if token else backend.begin_upload(NAME, len(body))
    for piece in upload.missing:
        upload.send(piece, io.BytesIO(body[piece.offset : piece.offset + piece.size_bytes]))
    upload.complete()
    return upload.token


@BODIES
def test_a_finished_upload_is_known_again_by_its_token(backend: S3Backend, proxy: ChaosProxy, body: bytes) -> None:
    token = send(backend, body)
    assert conditions(proxy) == ["*"]
    assert list(backend.resume_upload(NAME, len(body), token).missing) == []


@BODIES
def test_anothers_object_is_not_taken_for_the_staged_one(backend: S3Backend, body: bytes) -> None:
    backend.replace(NAME, bytes(len(body)))
    with pytest.raises(NameTakenError):
        send(backend, body)
    assert backend.get(NAME, max_bytes=len(body)) == bytes(len(body))


def test_a_single_put_whose_fate_is_unknown_is_sent_again_under_the_same_mark(backend: S3Backend, proxy: ChaosProxy) -> None:
    token = backend.begin_upload(NAME, len(SMALL)).token
    assert send(backend, SMALL, token) == token
    assert send(backend, SMALL, token) == token
    assert seen(proxy) == "HEAD PUT HEAD"


def test_an_upload_that_an_earlier_version_began_is_finished(backend: S3Backend) -> None:
    size, _, upload_id = send_first_piece(backend).partition("/")
    assert send(backend, LARGE, f"{size.partition('-')[0]}/{upload_id}")
    assert list(backend.resume_upload(NAME, len(LARGE), f"{size.partition('-')[0]}/{upload_id}").missing) == []


def send_first_piece(backend: S3Backend) -> str:
    upload = backend.begin_upload(NAME, len(LARGE))
    upload.send(upload.missing[0], io.BytesIO(LARGE[: upload.missing[0].size_bytes]))
    return upload.token

"""Every kind of request to S3 against every kind of fault: what may be sent again is, wherever the failure comes up.

`create` and the completion of an upload are sent again only after a look found the object absent, and never tell a lie.
"""

import io
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import s3fs

from tensorstore_ck.backend import Created, s3writer
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.s3requests import LONGEST_REPLY_SECONDS, NOTICE_SECONDS, RETRY_SECONDS, Timing, without_retries
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, PermissionDeniedError, StoreError
from tensorstore_ck.events import Event, event_text
from tests.backend.chaos import ChaosProxy, Fault, Plan, Request, chaos_proxy, first, once, silent_server
from tests.servers import BUCKET, S3Server, storage_options

MIB = 1 << 20
BODY = bytes(range(250)) * 4
PACK = bytes(range(256)) * (7 * MIB // 256)
SHORT_TIMEOUTS = {"connect_timeout": 0.3, "read_timeout": 0.3, "retries": {"total_max_attempts": 1}}


@pytest.fixture(scope="module")
def proxied(moto_server: S3Server) -> Iterator[ChaosProxy]:
    with chaos_proxy(moto_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxied: ChaosProxy) -> Iterator[ChaosProxy]:
    yield proxied
    proxied.plan = lambda _: Fault.NONE
    proxied.seen.clear()


@pytest.fixture(scope="module")
def filesystems(moto_server: S3Server, proxied: ChaosProxy) -> tuple[Any, Any]:
    """Through the proxy and past it; making a client takes longer than most tests."""
    return connect(proxied.url, SHORT_TIMEOUTS), connect(moto_server.endpoint, {})


@pytest.fixture
def place() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def direct(filesystems: tuple[Any, Any], place: str) -> Backend:
    return S3Backend(lambda: filesystems[1], BUCKET, place)


@pytest.fixture
def backend(filesystems: tuple[Any, Any], proxy: ChaosProxy, place: str) -> S3Backend:
    return S3Backend(lambda: filesystems[0], BUCKET, place, timing=Timing(max_tries=6, sleep=lambda _: None))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3writer, "PIECE_BYTES", 5 * MIB)  # the smallest that S3 takes


def connect(endpoint: str, config: dict[str, Any]) -> s3fs.S3FileSystem:
    return s3fs.S3FileSystem(**storage_options(endpoint), config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)


# --- what may be sent again ------------------------------------------------------------------------------------------------


def get(backend: S3Backend, direct: Backend) -> None:
    assert backend.get("a/there", max_bytes=len(BODY)) == BODY


def read_range(backend: S3Backend, direct: Backend) -> None:
    target = bytearray(500)
    backend.read_into("a/there", 100, memoryview(target))
    assert target == BODY[100:600]


def look_at(backend: S3Backend, direct: Backend) -> None:
    assert backend.size("a/there") == len(BODY)


def list_names(backend: S3Backend, direct: Backend) -> None:
    assert [info.name for info in backend.list("")] == ["a/there"]


def list_unfinished(backend: S3Backend, direct: Backend) -> None:
    assert [info.name.partition("?")[0] for info in backend.list_uploads()] == ["a/unfinished"]


def abort(backend: S3Backend, direct: Backend) -> None:
    (unfinished,) = (info.name for info in direct.list_uploads())
    backend.abort_upload(unfinished)
    assert not list(direct.list_uploads())


def resume(backend: S3Backend, direct: Backend) -> None:
    (unfinished,) = (info.name for info in direct.list_uploads())
    resumed = backend.resume_upload("a/unfinished", len(PACK), f"{5 * MIB}/{unfinished.partition('=')[2]}")
    assert [piece.number for piece in resumed.missing] == [2]


def put(backend: S3Backend, direct: Backend) -> None:
    backend.put("a/new", BODY)
    assert direct.get("a/new", max_bytes=len(BODY)) == BODY


def put_large(backend: S3Backend, direct: Backend) -> None:
    backend.put("a/new", PACK)
    assert direct.get("a/new", max_bytes=len(PACK)) == PACK


def delete(backend: S3Backend, direct: Backend) -> None:
    backend.delete(["a/there", "a/gone"])
    assert not list(direct.list(""))


def write_pack(backend: S3Backend, direct: Backend) -> None:
    writer = backend.open_writer("a/new")
    writer.append([PACK])
    writer.close()
    assert direct.get("a/new", max_bytes=len(PACK)) == PACK


def send_pieces(backend: S3Backend, direct: Backend) -> None:
    upload = backend.begin_upload("a/new", len(PACK))
    for piece in upload.missing:
        upload.send(piece, io.BytesIO(PACK[piece.offset : piece.offset + piece.size_bytes]))
    upload.complete()
    assert direct.get("a/new", max_bytes=len(PACK)) == PACK


Act = Callable[[S3Backend, Backend], None]
REPEATED: dict[str, tuple[str, str, Act]] = {
    "get": ("GET", "/there", get),
    "range": ("GET", "/there", read_range),
    "head": ("HEAD", "/there", look_at),
    "list": ("GET", "list-type=2", list_names),
    "list uploads": ("GET", "?uploads", list_unfinished),
    "list parts": ("GET", "uploadId=", resume),
    "put": ("PUT", "/new", put),
    "put large": ("PUT", "/new", put_large),
    "delete": ("POST", "?delete", delete),
    "abort": ("DELETE", "uploadId=", abort),
    "begin": ("POST", "?uploads", write_pack),
    "part": ("PUT", "partNumber=2", write_pack),
    "piece": ("PUT", "partNumber=1", send_pieces),
}
COMPLETED: dict[str, tuple[str, str, Act]] = {
    "complete": ("POST", "?uploadId=", write_pack),
    "complete resumable": ("POST", "?uploadId=", send_pieces),
}
PASSING = [fault for fault in Fault if fault not in (Fault.NONE, Fault.ANSWER, Fault.STATUS_403, Fault.STATUS_412, Fault.STATUS_501)]
NO_FAULTS = {  # of these requests: the reply has no body that could break off, or its body is the object
    "get": {Fault.ERROR_IN_200, Fault.BAD_200},
    "range": {Fault.ERROR_IN_200, Fault.BAD_200},
    "head": {Fault.CUT_404, Fault.ERROR_IN_200, Fault.BAD_200},
}
CASES = [(kind, fault) for kind in {**REPEATED, **COMPLETED} for fault in PASSING if fault not in NO_FAULTS.get(kind, set())]


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=lambda value: getattr(value, "name", value))
def test_one_fault_costs_nothing(kind: str, fault: Fault, backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    method, marker, act = {**REPEATED, **COMPLETED}[kind]
    prepare(kind, direct)
    plan, struck = once(fault, method, marker), []
    proxy.plan = lambda request: _note(plan(request), struck)
    act(backend, direct)
    assert struck == [fault], "the fault was met"


def _note(fault: Fault, struck: list[Fault]) -> Fault:
    if fault is not Fault.NONE:
        struck.append(fault)
    return fault


def prepare(kind: str, direct: Backend) -> None:
    """An object, and where it is asked for an upload of which one piece was sent."""
    direct.put("a/there", BODY)
    if kind in ("list uploads", "list parts", "abort"):
        assert isinstance(direct, S3Backend)
        begun = direct.begin_upload("a/unfinished", len(PACK))
        begun.send(begun.missing[0], io.BytesIO(PACK[: 5 * MIB]))


@pytest.mark.parametrize("kind", [*REPEATED, *COMPLETED])
def test_a_fault_that_stays_ends_with_the_tries(kind: str, backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    method, marker, act = {**REPEATED, **COMPLETED}[kind]
    prepare(kind, direct)
    proxy.plan = first(1000, Fault.STATUS_503, method, marker)
    with pytest.raises(BackendUnavailableError):
        act(backend, direct)
    assert sum(request.method == method and marker in request.path for request in proxy.seen) == 6, "botocore repeats nothing"


@pytest.mark.parametrize("kind", [*REPEATED, *COMPLETED])
def test_a_refusal_is_not_sent_again(kind: str, backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    method, marker, act = {**REPEATED, **COMPLETED}[kind]
    prepare(kind, direct)
    proxy.plan = first(1000, Fault.STATUS_403, method, marker)
    with pytest.raises(PermissionDeniedError):
        act(backend, direct)
    assert sum(request.method == method and marker in request.path for request in proxy.seen) == 1


def test_a_key_that_could_not_be_deleted_is_deleted_alone(backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    direct.put("a/there", BODY)
    key = f"{backend.url.removeprefix(f's3://{BUCKET}/')}/a/there"
    proxy.answer = (200, f"<DeleteResult><Error><Key>{key}</Key><Code>SlowDown</Code></Error></DeleteResult>".encode())
    steps = iter([Fault.ANSWER, Fault.STATUS_503, Fault.CUT_503])
    proxy.plan = lambda _: next(steps, Fault.NONE)
    backend.delete(["a/there"])
    assert not list(direct.list(""))
    assert [request.method for request in proxy.seen] == ["POST", "DELETE", "DELETE", "DELETE"]


# --- create and complete ----------------------------------------------------------------------------------------------------

ARRIVED = {
    Fault.LOSE_REPLY,
    Fault.HANG_AFTER,
    Fault.CUT_HEADERS,
    Fault.BAD_200,
}
"""Of the faults, those that strike after the server has done what was asked; a reply without a body cannot break off in it."""
UNHARMED = {Fault.CUT_BODY, Fault.HANG_IN_BODY}


def seen(proxy: ChaosProxy, name: str = "/one") -> str:
    """The methods of the requests on an object, in order."""
    return " ".join(request.method for request in proxy.seen if request.path.partition("?")[0].endswith(name))


@pytest.mark.parametrize("fault", [fault for fault in PASSING if fault is not Fault.CUT_404], ids=lambda fault: fault.name)
def test_a_create_is_looked_for_before_it_is_sent_again(fault: Fault, backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    proxy.plan = once(fault, "PUT")
    outcome = backend.create("log/one", b"mine")
    assert direct.get("log/one", max_bytes=10) == b"mine"
    assert outcome is (Created.EXISTS if fault in ARRIVED else Created.CREATED)
    assert " ".join(seen(proxy).split()).replace("PUT PUT", "PUT") in ("PUT", "PUT HEAD", "PUT HEAD PUT")


def test_a_create_is_never_sent_again_without_a_look(backend: S3Backend, proxy: ChaosProxy) -> None:
    """While nobody answers the looks, nothing is sent: what the first try did is not known."""
    proxy.plan = lambda request: Fault.STATUS_500 if request.method == "PUT" else Fault.STATUS_503
    assert backend.create("log/one", b"mine") is Created.UNKNOWN
    assert seen(proxy) == "PUT HEAD HEAD HEAD HEAD HEAD"


def test_a_create_of_anothers_name_exists(backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    direct.create("log/one", b"another's")
    for fault in (Fault.NONE, Fault.LOSE_REPLY, Fault.STATUS_500, Fault.CUT_404):
        proxy.plan = once(fault, "PUT")
        assert backend.create("log/one", b"mine") is Created.EXISTS
    assert direct.get("log/one", max_bytes=10) == b"another's"


def test_a_refused_create_is_an_error(backend: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(1000, Fault.STATUS_403, "PUT")
    with pytest.raises(PermissionDeniedError):
        backend.create("log/one", b"mine")
    assert seen(proxy) == "PUT"


@pytest.mark.parametrize("refusal", [Fault.STATUS_403, Fault.STATUS_501], ids=lambda fault: fault.name)
def test_a_refusal_after_a_try_that_may_have_arrived_is_no_refusal(refusal: Fault, backend: S3Backend, proxy: ChaosProxy) -> None:
    """The caller would take the error for the answer that nothing was written."""
    steps = iter([Fault.STATUS_500, Fault.NONE, refusal])
    proxy.plan = lambda _: next(steps, Fault.NONE)
    assert backend.create("log/one", b"mine") is Created.UNKNOWN
    assert seen(proxy) == "PUT HEAD PUT"


@pytest.mark.parametrize("fault", PASSING, ids=lambda fault: fault.name)
@pytest.mark.parametrize("act", [write_pack, send_pieces])
def test_a_completion_is_looked_for_before_it_is_sent_again(
    fault: Fault, act: Act, backend: S3Backend, direct: Backend, proxy: ChaosProxy
) -> None:
    proxy.plan = once(fault, "POST", "?uploadId=")
    act(backend, direct)
    ends = seen(proxy, "/new").rpartition("PUT")[2].split()
    done = fault in ARRIVED | UNHARMED
    assert ends == ["POST", "HEAD"] if done else ["POST", "HEAD", "POST"]


def test_a_completion_is_never_sent_again_without_a_look(backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    def plan(request: Request) -> Fault:
        if request.method == "POST" and "?uploadId=" in request.path:
            return Fault.STATUS_500
        return Fault.STATUS_503 if request.method == "HEAD" else Fault.NONE

    proxy.plan = plan
    with pytest.raises(BackendUnavailableError):
        write_pack(backend, direct)
    assert sum(request.method == "POST" and "?uploadId=" in request.path for request in proxy.seen) == 1

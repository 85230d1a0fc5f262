"""Every kind of request to S3 against every kind of fault: what may be sent again is, wherever the failure comes up.

`create` and the completion of an upload are sent again only after a look found the object absent, and never tell a lie.
"""

import io
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from tensorstore_ck.backend import Created, open_backend
from tensorstore_ck.backend.protocol import Backend, writing
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.errors import (
    BackendUnavailableError,
    InvalidOptionError,
    InvalidUrlError,
    MissingObjectError,
    PermissionDeniedError,
    UnsafeBackendError,
)
from tests.backend.chaos import ChaosProxy, Fault, Request, chaos_proxy, first, once
from tests.backend.conftest import TRIES
from tests.servers import BUCKET, S3Server, storage_options

MIB = 1 << 20
ALWAYS = 1000
BODY = bytes(range(250)) * 4
PACK = bytes(range(256)) * (6 * MIB // 256)
pytestmark = pytest.mark.usefixtures("small_pieces")

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
    with writing(backend, "a/new") as writer:
        writer.append([PACK])
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
UPLOADS = {"list uploads", "list parts", "abort"}
"""Of an upload that was begun before."""
OTHERS = {Fault.NONE, Fault.ANSWER, Fault.REPLY_412, Fault.REPLY_THEN_HANG, Fault.STATUS_403, Fault.STATUS_412, Fault.STATUS_501}
OTHERS |= {Fault.SHORT_BODY, Fault.WHOLE_BODY}
PASSING = [fault for fault in Fault if fault not in OTHERS]
NO_FAULTS = {  # of these requests: the reply has no body that could break off, or its body is the object
    "get": {Fault.ERROR_IN_200, Fault.BAD_200},
    "range": {Fault.ERROR_IN_200, Fault.BAD_200},
    "head": {Fault.CUT_404, Fault.ERROR_IN_200, Fault.BAD_200},
}
STRUCK = {
    "get": Fault.CUT_BODY,
    "range": Fault.HANG_IN_BODY,
    "head": Fault.STATUS_429,
    "list": Fault.ERROR_IN_200,
    "list uploads": Fault.CUT_404,
    "list parts": Fault.BAD_200,
    "put": Fault.LOSE_REPLY,
    "put large": Fault.HANG,
    "delete": Fault.CUT_HEADERS,
    "abort": Fault.STATUS_500,
    "begin": Fault.BAD_503,
    "part": Fault.STATUS_503,
    "piece": Fault.LOSE_REQUEST,
}
"""The fault that each request meets in every run. The slow runs try all faults on requests whose replies are read in different ways."""
CASES = [
    pytest.param(kind, fault, marks=() if STRUCK[kind] is fault else pytest.mark.slow)
    for kind in REPEATED
    for fault in PASSING
    if STRUCK[kind] is fault or (kind in ("get", "list", "put", "part") and fault not in {Fault.HANG_AFTER, *NO_FAULTS.get(kind, ())})
]


@pytest.mark.parametrize(("kind", "fault"), CASES, ids=lambda value: getattr(value, "name", value))
def test_one_fault_costs_nothing(kind: str, fault: Fault, backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    method, marker, act = prepared(kind, direct)
    plan, struck = once(fault, method, marker), list[Fault]()

    def note(request: Request) -> Fault:
        met = plan(request)
        struck.extend([met] if met is not Fault.NONE else [])
        return met

    proxy.plan = note
    act(backend, direct)
    assert struck == [fault], "the fault was met"


@pytest.mark.parametrize("fault", [Fault.SHORT_BODY, Fault.WHOLE_BODY], ids=lambda fault: fault.name)
def test_a_range_that_a_proxy_changed_is_no_damage(fault: Fault, backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    method, marker, act = prepared("range", direct)
    proxy.plan = once(fault, method, marker)
    act(backend, direct)
    proxy.plan = first(TRIES, fault, method, marker)
    with pytest.raises(BackendUnavailableError, match=r"cut short|whole object"):
        act(backend, direct)


def test_replies_that_are_no_range_give_their_connections_back(backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    direct.put("a/pack", PACK)
    proxy.plan = first(12, Fault.WHOLE_BODY, "GET", "a/pack")  # more than the client has connections
    pieces = [(start, bytearray(MIB // 4)) for start in range(MIB, 5 * MIB, MIB // 4)]
    for_each(pieces, lambda piece: backend.read_into("a/pack", piece[0], memoryview(piece[1])), len(pieces))
    assert all(piece == PACK[start : start + len(piece)] for start, piece in pieces)


def prepared(kind: str, direct: S3Backend) -> tuple[str, str, Act]:
    """With an object and, where it is asked for, an upload of which one piece was sent."""
    direct.put("a/there", BODY)
    if kind in UPLOADS:
        begun = direct.begin_upload("a/unfinished", len(PACK))
        begun.send(begun.missing[0], io.BytesIO(PACK[: 5 * MIB]))
    return {**REPEATED, **COMPLETED}[kind]


@pytest.mark.parametrize("kind", [*REPEATED, *COMPLETED])
def test_a_fault_that_stays_ends_with_the_tries_and_a_refusal_at_once(
    kind: str, backend: S3Backend, direct: S3Backend, proxy: ChaosProxy
) -> None:
    method, marker, act = prepared(kind, direct)
    before = list(direct.list_uploads())
    for fault, error, tries in ((Fault.STATUS_403, PermissionDeniedError, 1), (Fault.STATUS_503, BackendUnavailableError, TRIES)):
        proxy.seen.clear()
        proxy.plan = first(ALWAYS, fault, method, marker)
        with pytest.raises(error):
            act(backend, direct)
        assert sum(request.method == method and marker in request.path for request in proxy.seen) == tries, "botocore repeats nothing"
        if act is write_pack:
            assert list(direct.list_uploads()) == before, "what was begun is aborted"
    assert [info.name for info in direct.list("")] == ["a/there"]


@pytest.mark.parametrize("times", [2, TRIES])
def test_nobody_repeats_a_put_with_what_is_left_of_its_body(backend: S3Backend, direct: S3Backend, proxy: ChaosProxy, times: int) -> None:
    """The body is rewound before it is sent again, by aiohttp too; s3fs would not."""
    proxy.plan = first(times, Fault.LOSE_REPLY, "PUT")
    try:
        backend.put("a/one", b"body")
    except BackendUnavailableError:
        assert times == TRIES
    else:
        assert seen(proxy) == "PUT " * (times + 1) + "HEAD", "the last one is refused, and settled by a look"
    assert direct.get("a/one", max_bytes=10) == b"body"


def test_a_put_does_not_wait_for_ever_on_a_kept_connection(backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    """aiohttp would: it waits without end for leave to send the body."""
    proxy.plan = once(Fault.REPLY_THEN_HANG, "PUT")
    backend.put("a/first", BODY)
    backend.put("a/second", BODY)
    assert direct.get("a/second", max_bytes=len(BODY)) == BODY


def test_a_key_that_could_not_be_deleted_is_deleted_alone(backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    direct.put("a/there", BODY)
    key = f"{backend.url.removeprefix(f's3://{BUCKET}/')}/a/there"
    proxy.answer = (200, f"<DeleteResult><Error><Key>{key}</Key><Code>SlowDown</Code></Error></DeleteResult>".encode())
    steps = iter([Fault.ANSWER, Fault.STATUS_503, Fault.CUT_503])
    proxy.plan = lambda _: next(steps, Fault.NONE)
    backend.delete(["a/there"])
    assert not list(direct.list(""))
    assert [request.method for request in proxy.seen] == ["POST", "DELETE", "DELETE", "DELETE"]


# --- create and complete ----------------------------------------------------------------------------------------------------

ARRIVED = {Fault.LOSE_REPLY, Fault.HANG_AFTER, Fault.CUT_HEADERS, Fault.BAD_200}
"""Of the faults, those that strike after the server has done what was asked; a reply without a body cannot break off in it."""
UNHARMED = {Fault.CUT_BODY, Fault.HANG_IN_BODY}


def seen(proxy: ChaosProxy, name: str = "/one") -> str:
    """The methods of the requests on an object, in order."""
    return " ".join(request.method for request in proxy.seen if request.path.partition("?")[0].endswith(name))


@pytest.mark.parametrize("fault", [fault for fault in PASSING if fault is not Fault.CUT_404], ids=lambda fault: fault.name)
def test_a_create_is_looked_for_before_it_is_sent_again(fault: Fault, backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = once(fault, "PUT")
    outcome = backend.create("log/one", b"mine")
    assert direct.get("log/one", max_bytes=10) == b"mine"
    assert outcome is (Created.EXISTS if fault in ARRIVED else Created.CREATED)
    assert seen(proxy).replace("PUT PUT", "PUT") in ("PUT", "PUT HEAD", "PUT HEAD PUT"), "aiohttp alone sends twice"


def test_a_create_is_one_request_with_any_body(backend: S3Backend, proxy: ChaosProxy) -> None:
    assert backend.create("log/one", bytes(3 * MIB)) is Created.CREATED
    assert seen(proxy) == "PUT"


def test_a_create_is_never_sent_again_without_a_look(backend: S3Backend, proxy: ChaosProxy) -> None:
    """While nobody answers the looks, nothing is sent: what the first try did is not known."""
    proxy.plan = lambda request: Fault.STATUS_500 if request.method == "PUT" else Fault.STATUS_503
    assert backend.create("log/one", b"mine") is Created.UNKNOWN
    assert seen(proxy) == "PUT" + " HEAD" * (TRIES - 1)


@pytest.mark.parametrize("fault", [Fault.LOSE_REQUEST, Fault.STATUS_409, Fault.STATUS_503], ids=lambda fault: fault.name)
def test_a_create_that_may_not_have_arrived_is_unknown(fault: Fault, backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(ALWAYS, fault, "PUT")
    assert backend.create("log/one", b"mine") is Created.UNKNOWN
    with pytest.raises(MissingObjectError):
        direct.get("log/one", max_bytes=100)


def test_a_create_of_anothers_name_exists(backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    direct.create("log/one", b"another's")
    for fault in (Fault.NONE, Fault.LOSE_REPLY, Fault.STATUS_500, Fault.CUT_404, Fault.STATUS_412):
        proxy.plan = once(fault, "PUT")
        assert backend.create("log/one", b"mine") is Created.EXISTS
    assert direct.get("log/one", max_bytes=10) == b"another's"


@pytest.mark.parametrize(("fault", "error"), [(Fault.STATUS_403, PermissionDeniedError), (Fault.STATUS_501, UnsafeBackendError)])
def test_a_refused_create_is_an_error(fault: Fault, error: type[Exception], backend: S3Backend, proxy: ChaosProxy) -> None:
    proxy.plan = first(ALWAYS, fault, "PUT")
    with pytest.raises(error):
        backend.create("log/one", b"mine")
    assert seen(proxy) == "PUT"


@pytest.mark.parametrize("refusal", [Fault.STATUS_403, Fault.STATUS_501], ids=lambda fault: fault.name)
def test_a_refusal_after_a_try_that_may_have_arrived_is_no_refusal(refusal: Fault, backend: S3Backend, proxy: ChaosProxy) -> None:
    """The caller would take the error for the answer that nothing was written."""
    steps = iter([Fault.STATUS_500, Fault.NONE, refusal])
    proxy.plan = lambda _: next(steps, Fault.NONE)
    assert backend.create("log/one", b"mine") is Created.UNKNOWN
    assert seen(proxy) == "PUT HEAD PUT"


def test_a_botocore_without_conditional_writes_is_refused() -> None:
    model = SimpleNamespace(input_shape=SimpleNamespace(members={"Bucket": None, "Key": None, "Body": None}))
    service = SimpleNamespace(operation_model=lambda _: model)
    filesystem = SimpleNamespace(s3=SimpleNamespace(meta=SimpleNamespace(service_model=service)))
    with pytest.raises(UnsafeBackendError, match="pip install"):
        S3Backend(lambda: filesystem, BUCKET, "x").create("log/1", b"mine")


@pytest.mark.parametrize(
    ("fault", "act"),
    [(fault, (write_pack, send_pieces)[number % 2]) for number, fault in enumerate(PASSING)],
    ids=lambda value: getattr(value, "name", None),
)
def test_a_completion_is_looked_for_before_it_is_sent_again(
    fault: Fault, act: Act, backend: S3Backend, direct: S3Backend, proxy: ChaosProxy
) -> None:
    proxy.plan = once(fault, "POST", "?uploadId=")
    act(backend, direct)
    ends = seen(proxy, "/new").rpartition("PUT")[2].split()
    done = fault in ARRIVED | UNHARMED
    assert ends == ["POST", "HEAD"] if done else ["POST", "HEAD", "POST"]


def test_a_completion_is_never_sent_again_without_a_look(backend: S3Backend, direct: S3Backend, proxy: ChaosProxy) -> None:
    def plan(request: Request) -> Fault:
        if request.method == "POST" and "?uploadId=" in request.path:
            return Fault.STATUS_500
        return Fault.STATUS_503 if request.method == "HEAD" else Fault.NONE

    proxy.plan = plan
    with pytest.raises(BackendUnavailableError):
        write_pack(backend, direct)
    assert sum(request.method == "POST" and "?uploadId=" in request.path for request in proxy.seen) == 1


@pytest.mark.s3
def test_lost_replies_on_a_real_server(seaweedfs_server: S3Server, place: str) -> None:
    with chaos_proxy(seaweedfs_server.port) as proxy:
        options = {**storage_options(proxy.url), "config_kwargs": {"retries": {"max_attempts": 1}}}
        backend = open_backend(f"s3://{BUCKET}/{place}", options)
        assert isinstance(backend, S3Backend)
        proxy.plan = first(ALWAYS, Fault.LOSE_REPLY, "PUT", "log")
        assert backend.create("log/one", b"mine") in (Created.EXISTS, Created.UNKNOWN)
        assert backend.get("log/one", max_bytes=10) == b"mine"
        proxy.plan = once(Fault.LOSE_REPLY, "POST", "uploadId=")
        write_pack(backend, backend)
        backend.close()


# --- what no request can repair -----------------------------------------------------------------------------------------------


def test_no_bucket_is_an_invalid_url(direct_client: object) -> None:
    backend = S3Backend(lambda: direct_client, "nobody-made-this", "x")
    for attempt in (lambda: backend.get("a/b", max_bytes=1), lambda: backend.put("a/b", b"x"), lambda: list(backend.list(""))):
        with pytest.raises(InvalidUrlError, match="bucket"):
            attempt()


def test_options_that_botocore_does_not_take(moto_server: S3Server) -> None:
    backend = open_backend("s3://bucket/x", {**moto_server.storage_options, "no_such_option": 1})
    with pytest.raises(InvalidOptionError, match="no_such_option"):
        backend.get("a/b", max_bytes=1)
    backend.close()

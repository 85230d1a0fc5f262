"""Every kind of request to S3 against every kind of fault: what may be sent again is, wherever the failure comes up.

`create` and the completion of an upload are sent again only after a look found the object absent, and never tell a lie.
"""

import asyncio
import io
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import s3fs
from fsspec.asyn import get_loop

from tensorstore_ck.backend import Created, open_backend, s3_multipart_writer
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.s3_requests import (
    LONGEST_PAUSE_SECONDS,
    NOTICE_SECONDS,
    RETRY_SECONDS,
    OnProgress,
    Request,
    RetryTiming,
    S3Requests,
    without_retries,
)
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, PermissionDeniedError, StoreError
from tensorstore_ck.events import Event, event_text
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy, first, once, silent_server
from tests.backend.chaos import Request as Seen
from tests.servers import BUCKET, S3Server, refusing_port, storage_options

MIB = 1 << 20
HANGING = {Fault.HANG, Fault.HANG_AFTER, Fault.HANG_IN_BODY, Fault.REPLY_THEN_HANG}
BODY = bytes(range(250)) * 4
PACK = bytes(range(256)) * (7 * MIB // 256)
TIMEOUTS = {"connect_timeout": 20, "read_timeout": 20, "retries": {"total_max_attempts": 1}}
SHORT_TIMEOUTS = {"connect_timeout": 0.5, "read_timeout": 0.5, "retries": {"total_max_attempts": 1}}
"""Where no request is answered."""
IMPATIENT = {**TIMEOUTS, "connect_timeout": 2, "read_timeout": 2}
"""Where all requests but some are answered."""


@pytest.fixture(scope="module")
def proxied(moto_server: S3Server) -> Iterator[ChaosProxy]:
    with chaos_proxy(moto_server.port) as proxy:
        yield proxy


@pytest.fixture
def proxy(proxied: ChaosProxy) -> Iterator[ChaosProxy]:
    yield proxied
    proxied.plan = lambda _: Fault.NONE
    proxied.hang_up()
    proxied.seen.clear()


@pytest.fixture(scope="module")
def filesystems(moto_server: S3Server, proxied: ChaosProxy) -> dict[str, Any]:
    """Past the proxy, and through it with two kinds of patience; making a client takes longer than most tests."""
    return {
        "direct": connect(moto_server.endpoint, TIMEOUTS),
        "proxied": connect(proxied.url, TIMEOUTS),
        "impatient": connect(proxied.url, IMPATIENT),
    }


@pytest.fixture
def place() -> str:
    return str(uuid.uuid4())


@pytest.fixture
def direct(filesystems: dict[str, Any], place: str) -> Backend:
    return S3Backend(lambda: filesystems["direct"], BUCKET, place)


@pytest.fixture
def backend(filesystems: dict[str, Any], proxy: ChaosProxy, place: str, request: pytest.FixtureRequest) -> S3Backend:
    """Of short patience where the server hangs."""
    fault = getattr(getattr(request.node, "callspec", None), "params", {}).get("fault")
    filesystem = filesystems["impatient" if fault in HANGING else "proxied"]
    return S3Backend(lambda: filesystem, BUCKET, place, timing=RetryTiming(max_tries=6, sleep=lambda _: None))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 * MIB)  # the smallest that S3 takes


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
OTHERS = {Fault.NONE, Fault.ANSWER, Fault.REPLY_412, Fault.REPLY_THEN_HANG, Fault.STATUS_403, Fault.STATUS_412, Fault.STATUS_501}
PASSING = [fault for fault in Fault if fault not in OTHERS]
NO_FAULTS = {  # of these requests: the reply has no body that could break off, or its body is the object
    "get": {Fault.ERROR_IN_200, Fault.BAD_200},
    "range": {Fault.ERROR_IN_200, Fault.BAD_200},
    "head": {Fault.CUT_404, Fault.ERROR_IN_200, Fault.BAD_200},
}
CASES = [(kind, fault) for kind in REPEATED for fault in PASSING if fault not in {Fault.HANG_AFTER, *NO_FAULTS.get(kind, ())}]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "fault"), CASES, ids=lambda value: getattr(value, "name", value))
def test_one_fault_costs_nothing(kind: str, fault: Fault, backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    method, marker, act = REPEATED[kind]
    prepare(kind, direct)
    plan, struck = once(fault, method, marker), list[Fault]()
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
    assert seen(proxy).replace("PUT PUT", "PUT") in ("PUT", "PUT HEAD", "PUT HEAD PUT"), "aiohttp alone sends twice"


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
    def plan(request: Seen) -> Fault:
        if request.method == "POST" and "?uploadId=" in request.path:
            return Fault.STATUS_500
        return Fault.STATUS_503 if request.method == "HEAD" else Fault.NONE

    proxy.plan = plan
    with pytest.raises(BackendUnavailableError):
        write_pack(backend, direct)
    assert sum(request.method == "POST" and "?uploadId=" in request.path for request in proxy.seen) == 1


# --- how long, and what is said meanwhile -----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [Fault.REPLY_THEN_HANG], ids=lambda fault: fault.name)
def test_a_put_does_not_wait_for_ever_on_a_kept_connection(fault: Fault, backend: S3Backend, direct: Backend, proxy: ChaosProxy) -> None:
    """aiohttp would: it waits without end for leave to send the body."""
    proxy.plan = once(fault, "PUT")
    for name in ("a/first", "a/second"):
        backend.put(name, BODY)
        assert direct.get(name, max_bytes=len(BODY)) == BODY


SILENT: dict[str, Callable[[S3Backend], object]] = {
    "get": lambda backend: backend.get("a/b", max_bytes=1),
    "range": lambda backend: backend.read_into("a/b", 0, memoryview(bytearray(1))),
    "head": lambda backend: backend.size("a/b"),
    "list": lambda backend: list(backend.list("")),
    "put": lambda backend: backend.put("a/b", BODY),
    "put large": lambda backend: backend.put("a/b", bytes(20 * MIB)),
    "delete": lambda backend: backend.delete(["a/b"]),
    "writer": lambda backend: write_pack(backend, backend),
}


@pytest.fixture(scope="module")
def silent() -> Iterator[Any]:
    """A filesystem at a server that takes connections, and neither reads nor answers."""
    with silent_server() as endpoint:
        yield connect(endpoint, SHORT_TIMEOUTS)


@pytest.mark.parametrize("kind", SILENT)
def test_a_silent_server_is_an_error_in_the_end_and_said_before(kind: str, silent: Any, place: str) -> None:
    events: list[Event] = []
    timing = RetryTiming(max_tries=2, notice_seconds=0.01)
    backend = S3Backend(lambda: silent, BUCKET, place, timing=timing, on_wait=events.append)
    with pytest.raises(BackendUnavailableError):
        SILENT[kind](backend)
    assert {event.kind for event in events} == {"waiting"}
    assert events[0].fields["try_number"] == 1
    assert all(backend.url in str(event.fields["what"]) for event in events)
    assert events[0].fields["error"] == ""


def test_a_silent_server_leaves_a_create_unknown(silent: Any, place: str) -> None:
    events: list[Event] = []
    timing = RetryTiming(max_tries=2, notice_seconds=0.01)
    assert S3Backend(lambda: silent, BUCKET, place, timing=timing, on_wait=events.append).create("a/b", BODY) is Created.UNKNOWN
    assert events


class Clock:
    """Time that passes only while something is waited for."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, future: "Future[Any]", seconds: float) -> bool:
        self.now += seconds
        return False


def requests(said: list[Event], timing: RetryTiming) -> S3Requests:
    filesystem = SimpleNamespace(loop=get_loop())
    return S3Requests("s3://bucket/runs", BUCKET, lambda: filesystem, timing, said.append)


async def never(filesystem: Any, on_progress: OnProgress) -> None:
    await asyncio.Event().wait()


async def refused(filesystem: Any, on_progress: OnProgress) -> None:
    raise ConnectionRefusedError("nobody listens")


def test_the_first_line_comes_after_five_seconds_and_each_next_one_after_twice_as_long() -> None:
    clock, said = Clock(), list[Event]()
    timing = RetryTiming(clock=clock, wait=clock.wait, sleep=clock.sleep)
    with pytest.raises(BackendUnavailableError, match="nothing moved for 300 s"):
        requests(said, timing).begin("read", "store.json").repeat(Request(never))
    assert [event.fields["wait_seconds"] for event in said] == [5, 10, 20, 40, 80, 160]
    assert event_text(said[0]) == "still waiting after 5.0 s to read store.json in s3://bucket/runs (try 1)"


def test_a_server_that_refuses_every_try_is_said_to_do_so_and_is_given_up_with_the_budget() -> None:
    clock, said = Clock(), list[Event]()
    timing = RetryTiming(clock=clock, sleep=clock.sleep, jitter=lambda: 1.0)
    with pytest.raises(BackendUnavailableError, match="nobody listens"):
        requests(said, timing).begin("read", "store.json").repeat(Request(refused))
    assert RETRY_SECONDS <= clock.now - 1000 < RETRY_SECONDS + LONGEST_PAUSE_SECONDS
    assert said
    assert event_text(said[0]).endswith("; the last one failed: nobody listens)")


def test_what_moves_is_not_waited_for() -> None:
    """A long transfer is no silence, and has its whole budget left when it breaks off."""
    clock, said, tries = Clock(), list[Event](), []

    async def slow(filesystem: Any, on_progress: OnProgress) -> str:
        for _ in range(100):
            clock.now += NOTICE_SECONDS - 1
            on_progress()
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionResetError("cut")
        return "done"

    timing = RetryTiming(clock=clock, sleep=clock.sleep)
    assert requests(said, timing).begin("read", "packs/one").repeat(Request(slow)) == "done"


def test_threads_that_wait_for_one_server_share_a_line() -> None:
    clock, said = Clock(), list[Event]()
    shared = requests(said, RetryTiming(clock=clock, wait=clock.wait, sleep=clock.sleep, retry_seconds=0))
    clocks = [clock.now]
    for name in ("a", "b"):
        clock.now = clocks[0]  # both begin at once
        with pytest.raises(BackendUnavailableError):
            shared.begin("read", name).repeat(Request(never))
    assert {event.fields["what"] for event in said} == {"read a in s3://bucket/runs"}


# --- options ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("retries", "tries"),
    [(None, None), ({"mode": "standard"}, None), ({"max_attempts": 2}, 3), ({"max_attempts": 9, "total_max_attempts": 4}, 4)],
)
def test_the_number_of_retries_that_a_user_gives_is_kept(retries: dict[str, Any] | None, tries: int | None) -> None:
    given = {"key": "k", "config_kwargs": {"read_timeout": 3, **({} if retries is None else {"retries": retries})}}
    options, found = without_retries(given)
    assert found == tries
    assert options["config_kwargs"]["read_timeout"] == 3
    assert options["config_kwargs"]["retries"]["total_max_attempts"] == 1


@pytest.mark.parametrize("wrong", [{"retries": {"max_attempts": "many"}}, {"retries": "never"}, {"retries": {"total_max_attempts": 0}}])
def test_retries_that_are_none_are_an_error_of_the_options(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError, match="retries"):
        open_backend(f"s3://{BUCKET}/x", {"config_kwargs": wrong})


@pytest.mark.parametrize(
    "options", [{"config_kwargs": {"retries": {"mode": "often"}}}, {"endpoint_url": "no url"}, {"config_kwargs": {"signature_version": 7}}]
)
def test_wrong_options_are_not_tried_again(options: dict[str, Any]) -> None:
    slept: list[float] = []
    single_shot, _ = without_retries({**storage_options("http://127.0.0.1:1"), **options})
    timing = RetryTiming(sleep=slept.append)
    backend = S3Backend(lambda: s3fs.S3FileSystem(**single_shot, skip_instance_cache=True), BUCKET, "x", timing=timing)
    with pytest.raises(StoreError):
        backend.get("a/b", max_bytes=1)
    assert not slept


def test_a_server_that_is_not_there_yet_is_tried_again() -> None:
    slept: list[float] = []
    with refusing_port() as port:
        filesystem = connect(f"http://127.0.0.1:{port}", SHORT_TIMEOUTS)
        backend = S3Backend(lambda: filesystem, BUCKET, "x", timing=RetryTiming(max_tries=3, sleep=slept.append))
        with pytest.raises(BackendUnavailableError):
            backend.get("a/b", max_bytes=1)
    assert len(slept) == 2

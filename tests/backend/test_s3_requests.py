"""How long requests to S3 are repeated, and what is said meanwhile; which options are errors at once."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
import s3fs
from fsspec.asyn import get_loop

from tensorstore_ck.backend import Created, open_backend
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.s3_requests import (
    LONGEST_PAUSE_SECONDS,
    RETRY_SECONDS,
    OnProgress,
    Request,
    RetryTiming,
    S3Requests,
    without_retries,
)
from tensorstore_ck.backend.wait_notices import NOTICE_SECONDS
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, StoreError
from tensorstore_ck.events import Event, event_text
from tests.backend.chaos import silent_server
from tests.backend.conftest import connect
from tests.servers import BUCKET, refusing_port, storage_options

SHORT_SECONDS = 0.1
"""The timeout where no request is answered."""


SILENT: dict[str, Callable[[S3Backend], object]] = {
    "get": lambda backend: backend.get("a/b", max_bytes=1),
    "read": lambda backend: backend.read_into("a/b", 0, memoryview(bytearray(9))),
    "size": lambda backend: backend.size("a/b"),
    "list": lambda backend: [*backend.list("a/")],
    "delete": lambda backend: backend.delete(["a/b"]),
    "put": lambda backend: backend.put("a/b", b"body"),
    "put large": lambda backend: backend.put("a/b", bytes(20 << 20)),
    "create": lambda backend: backend.create("a/b", b"body"),
}


@pytest.fixture(scope="module")
def silent() -> Iterator[s3fs.S3FileSystem]:
    """A client of a server that takes connections, and neither reads nor answers."""
    with silent_server() as endpoint:
        yield connect(endpoint, SHORT_SECONDS)


@pytest.mark.parametrize("kind", SILENT)
def test_a_silent_server_is_an_error_in_the_end_and_said_before(kind: str, silent: s3fs.S3FileSystem) -> None:
    events: list[Event] = []
    timing = RetryTiming(max_tries=2, notice_seconds=0.01, sleep=lambda _: None)
    backend = S3Backend(lambda: silent, BUCKET, "x", timing=timing, on_wait=events.append)
    if kind == "create":
        assert SILENT[kind](backend) is Created.UNKNOWN
    else:
        with pytest.raises(BackendUnavailableError, match="check the connection") as caught:
            SILENT[kind](backend)
        assert backend.url in str(caught.value)
    assert {event.kind for event in events} == {"waiting"}
    assert events[0].fields["try_number"] == 1
    assert all(backend.url in str(event.fields["what"]) for event in events)
    assert events[0].fields["error"] == ""


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
        filesystem = connect(f"http://127.0.0.1:{port}")
        backend = S3Backend(lambda: filesystem, BUCKET, "x", timing=RetryTiming(max_tries=3, sleep=slept.append))
        with pytest.raises(BackendUnavailableError):
            backend.get("a/b", max_bytes=1)
        assert len(slept) == 2
        assert backend.create("a/b", b"x") is Created.UNKNOWN

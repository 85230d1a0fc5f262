"""An S3 backend on moto behind a proxy that disturbs its requests, and the same bucket past the proxy. Making a client takes longer than
most tests, so each is made once."""

import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

import pytest
import s3fs

from tensorstore_ck.backend import s3_multipart_writer
from tensorstore_ck.backend.s3 import S3Backend
from tensorstore_ck.backend.s3_requests import RetryTiming
from tests.backend.chaos import ChaosProxy, Fault, chaos_proxy
from tests.effort import PATIENCE_SECONDS
from tests.servers import BUCKET, S3Server, storage_options

TRIES = 4
LOOK_SECONDS = 0.02


class Hangs:
    """Time that passes only while a request hangs at the proxy: then all timeouts are over at once."""

    def __init__(self, proxy: ChaosProxy) -> None:
        self.now = 0.0
        self._proxy = proxy

    def clock(self) -> float:
        return self.now

    def wait(self, future: "Future[Any]", _: float) -> bool:
        while not wait_for_futures([future], LOOK_SECONDS).done:
            if self._proxy.hanging.is_set():
                self.now += 1000
                return False
        return True

    def sleep(self, _: float) -> None:
        """Before the next try, which begins when the client has left the request that hangs."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while self._proxy.hanging.is_set() and time.monotonic() < deadline:
            time.sleep(LOOK_SECONDS)

    def timing(self, tries: int = TRIES) -> RetryTiming:
        return RetryTiming(tries, float("inf"), clock=self.clock, wait=self.wait, sleep=self.sleep)


def connect(endpoint: str, seconds: float = PATIENCE_SECONDS) -> s3fs.S3FileSystem:
    """A client that does not retry."""
    config = {"connect_timeout": seconds, "read_timeout": seconds, "retries": {"total_max_attempts": 1}}
    return s3fs.S3FileSystem(**storage_options(endpoint), config_kwargs=config, use_listings_cache=False, skip_instance_cache=True)


@pytest.fixture(scope="session")
def moto_proxy(moto_server: S3Server) -> Iterator[ChaosProxy]:
    with chaos_proxy(moto_server.port) as proxy:
        yield proxy


@pytest.fixture(scope="session")
def direct_client(moto_server: S3Server) -> s3fs.S3FileSystem:
    return connect(moto_server.endpoint)


@pytest.fixture(scope="session")
def proxied_client(moto_proxy: ChaosProxy) -> s3fs.S3FileSystem:
    return connect(moto_proxy.url)


@pytest.fixture
def proxy(moto_proxy: ChaosProxy) -> Iterator[ChaosProxy]:
    moto_proxy.seen.clear()
    yield moto_proxy
    moto_proxy.plan = lambda _: Fault.NONE
    moto_proxy.hang_up()


@pytest.fixture
def place() -> str:
    """A prefix that nobody else uses."""
    return str(uuid.uuid4())


@pytest.fixture
def direct(direct_client: s3fs.S3FileSystem, place: str) -> S3Backend:
    return S3Backend(lambda: direct_client, BUCKET, place)


@pytest.fixture
def backend(proxied_client: s3fs.S3FileSystem, proxy: ChaosProxy, place: str) -> S3Backend:
    return S3Backend(lambda: proxied_client, BUCKET, place, timing=Hangs(proxy).timing())


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_multipart_writer, "PIECE_BYTES", 5 << 20)  # the smallest that S3 takes

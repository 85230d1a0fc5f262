"""S3 requests: which failures are retried and for how long, and the notices meanwhile.

Every request goes through here, so a failure is treated the same wherever it occurs: in the connection, in the status, in the reply's
body, in botocore's parser. botocore itself does not retry (`without_retries`). aiohttp still resends a request once when a kept
connection turns out to be closed, so even a single try may arrive twice.

The caller's thread waits; the request runs on the event loop of the filesystem.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, BinaryIO, Final, Generic, Literal, NamedTuple, TypeVar

from tensorstore_ck.backend.remote_errors import FINAL_STATUSES, PASSING_CODES, PASSING_STATUSES, error_code, http_status, remote_errors
from tensorstore_ck.backend.s3_quirks import drop_checksums, may_refuse_checksums, refuses_checksums
from tensorstore_ck.backend.wait_notices import NOTICE_SECONDS, WaitNotices
from tensorstore_ck.common.retry import JITTER, next_delay
from tensorstore_ck.common.waiting import Flag
from tensorstore_ck.errors import BackendUnavailableError, InvalidOptionError, MissingObjectError, StoreError
from tensorstore_ck.events import Callback

RETRY_SECONDS: Final = 45.0
"""No further try begins this long after the first failure."""
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
LONGEST_REPLY_SECONDS: Final = 300.0
"""S3 may take minutes to complete an upload; it sends blanks meanwhile, which only aiohttp sees."""
POLL_SECONDS: Final = 1.0
"""How often to check the progress of a request's body."""
CANCEL_SECONDS: Final = 1.0

_PASSING_BOTOCORE_ERRORS: Final = {"HTTPClientError", "ConnectionError", "IncompleteReadError", "ChecksumError", "FlexibleChecksumError"}
"""botocore's other errors concern options, credentials and arguments."""
_NOT_THE_SERVER: Final = (ValueError, TypeError, AttributeError, LookupError, AssertionError, RuntimeError)
"""An interpreter that is shutting down raises some of these, too."""

T = TypeVar("T")
OnProgress = Callable[[], None]
"""Called when bytes of a reply have come."""


def without_retries(storage_options: Mapping[str, Any]) -> tuple[dict[str, Any], int | None]:
    """s3fs's options with botocore's own retries off, and the number of tries that they allowed; None: no number was given.

    Raises:
        InvalidOptionError: an invalid number of retries.
    """
    config = storage_options.get("config_kwargs") or {}
    retries = (config.get("retries") or {}) if isinstance(config, Mapping) else None
    if not isinstance(retries, Mapping):
        raise InvalidOptionError("config_kwargs in storage_options must be a dict, and so must its retries", object_id="config_kwargs")
    tries = retries.get("total_max_attempts")
    if tries is None and isinstance(tries := retries.get("max_attempts"), int):
        tries += 1
    if tries is not None and (not isinstance(tries, int) or tries < 1):
        raise InvalidOptionError(f"retries in storage_options: {dict(retries)!r} has no valid number of tries", object_id="retries")
    kept = {name: value for name, value in retries.items() if name != "max_attempts"}
    return {**storage_options, "config_kwargs": {**config, "retries": {**kept, "total_max_attempts": 1}}}, tries


def is_passing(error: StoreError) -> bool:
    """Whether the same request may succeed a moment later: there was no answer, a broken one, or one that says so."""
    cause = error.__cause__
    if not isinstance(error, BackendUnavailableError) or cause is None:
        return False
    if isinstance(cause, _NOT_THE_SERVER):
        return False
    kinds = {kind.__name__ for kind in type(cause).__mro__}
    if "BotoCoreError" in kinds:
        wrapped = getattr(cause, "kwargs", {}).get("error")  # what aiohttp raised
        return not kinds.isdisjoint(_PASSING_BOTOCORE_ERRORS) and not isinstance(wrapped, RuntimeError)
    status = http_status(cause)
    if status in PASSING_STATUSES or not status or error_code(cause) in PASSING_CODES:
        return True
    return status >= 500 and status not in FINAL_STATUSES


def wait(future: "Future[Any]", seconds: float) -> bool:
    """Whether `future` is done within that time."""
    return bool(wait_for_futures([future], seconds).done)


class RetryTiming(NamedTuple):
    """How long to wait, and by which clock."""

    max_tries: int | None = None
    retry_seconds: float = RETRY_SECONDS
    notice_seconds: float = NOTICE_SECONDS
    clock: Callable[[], float] = time.monotonic
    wait: Callable[["Future[Any]", float], bool] = wait
    sleep: Callable[[float], object] = time.sleep
    jitter: Callable[[], float] = JITTER
    """Between 0 and 1."""


class Request(NamedTuple, Generic[T]):
    """One request, which can be sent several times."""

    send: Callable[[Any, OnProgress], Awaitable[T]]
    """Sends it through a filesystem."""
    body: BinaryIO | None = None
    """With a body, the wait for the reply is limited by the connection's timeouts, counted from the last byte of the body that was read."""


class S3Requests:
    """Sends the requests of one backend. Thread-safe."""

    def __init__(
        self, url: str, bucket: str, filesystem: Callable[[], Any], timing: RetryTiming, on_wait: Callback, *, secrets: Sequence[str] = ()
    ) -> None:
        """`filesystem` returns this process's; `on_wait` is called with events of the kind ``waiting``, on the thread that waits.

        `secrets` are removed from messages.
        """
        self.url = url
        self.secrets = secrets
        self.filesystem = filesystem
        self.timing = timing
        self.bucket = bucket
        self.notices = WaitNotices(on_wait, timing.notice_seconds, timing.clock)

    def call(self, action: str, name: str, method: str, *, max_tries: int | None = None, **arguments: Any) -> dict[str, Any]:
        """One request, with retries; `action` and `name` are for messages.

        Raises:
            BackendUnavailableError: no try succeeded.
            StoreError: the store refused.
        """
        return self.begin(action, name, max_tries).repeat(self.request(method, **arguments))

    def begin(self, action: str, name: str, max_tries: int | None = None) -> "Operation":
        """An operation that has not sent a request yet."""
        return Operation(self, action, name, max_tries or self.timing.max_tries)

    def request(self, method: str, **arguments: Any) -> Request[dict[str, Any]]:
        """A request on the bucket. Its ``Body``, if any, is sent from its current position."""
        body: BinaryIO | None = arguments.get("Body")
        start = 0 if body is None else body.tell()

        async def send(filesystem: Any, _: OnProgress) -> dict[str, Any]:
            if body is not None:
                body.seek(start)
            reply: dict[str, Any] = await filesystem._call_s3(method, Bucket=self.bucket, **arguments)
            return reply

        return Request(send, body)


class Operation:
    """Requests that share one time limit for their retries. Not thread-safe."""

    def __init__(self, requests: S3Requests, action: str, name: str, max_tries: int | None) -> None:
        self.attempt = 1
        self._requests = requests
        self._timing = requests.timing
        self._action = action
        self._name = name
        self._max_tries = max_tries
        self._progress_at = self._timing.clock()
        self._trouble_since: float | None = None
        self._trouble = ""
        self._notice_after = self._timing.notice_seconds

    def repeat(self, request: Request[T]) -> T:
        """The reply; retries after each transient fault, within the time limit."""
        while True:
            try:
                return self.once(request)
            except StoreError as exc:
                if not is_passing(exc) or not self.pause(exc):
                    raise

    def once(self, request: Request[T]) -> T:
        """The reply, without retries; but a refusal of checksums did nothing, and the request is sent again without them."""
        try:
            return self._try(request)
        except StoreError as exc:
            is_refused = may_refuse_checksums(exc) if request.body is not None else refuses_checksums(exc)
            if not is_refused or not drop_checksums(self._requests.filesystem()):
                raise
        return self._try(request)

    def pause(self, error: StoreError) -> bool:
        """Waits before the next try; False if no further try is allowed."""
        timing = self._timing
        if self._trouble_since is None:
            self._trouble_since = self._progress_at
        if self.attempt == self._max_tries or timing.clock() - self._trouble_since >= timing.retry_seconds:
            return False
        self._trouble = f"{error.__cause__ or error}"
        timing.sleep(next_delay(self.attempt - 1, FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, jitter=timing.jitter))
        self.attempt += 1
        return True

    def poll_outcome(self, error: StoreError, request: Request[T]) -> T | Literal[False] | None:
        """The reply to `request` about an object, which another request that failed with `error` may have made.

        False: there is none; None: there was no answer.
        """
        while self.pause(error):
            try:
                return self.once(request)
            except MissingObjectError:
                return False
            except StoreError as exc:
                if not is_passing(exc):
                    return None
                error = exc
        return None

    def _try(self, request: Request[T]) -> T:
        with remote_errors(self._action, self._name, self._requests.url, self._requests.secrets):
            return self._send(request, self._requests.filesystem())

    def _send(self, request: Request[T], filesystem: Any) -> T:
        ended = Flag()

        async def run() -> T:
            try:
                return await request.send(filesystem, self._note_progress)
            finally:
                ended.set()

        self._note_progress()
        future = asyncio.run_coroutine_threadsafe(run(), filesystem.loop)
        try:
            self._watch(future, request.body, LONGEST_REPLY_SECONDS if request.body is None else _timeout_seconds(filesystem))
            return future.result()
        finally:
            if future.cancel():
                ended.wait(CANCEL_SECONDS)  # the caller may use its buffers again

    def _watch(self, future: "Future[Any]", body: BinaryIO | None, longest_seconds: float) -> None:
        """Returns when `future` is done.

        aiohttp has no timeout while it waits for permission to send a body, nor while the server does not read it.
        """
        position = -1
        while True:
            now, longest_wait = self._timing.clock(), float("inf")
            if body is not None:
                longest_wait, before, position = POLL_SECONDS, position, body.tell()
                if position != before:
                    self._progress_at = now
            idle = now - self._progress_at
            if idle >= longest_seconds:
                raise TimeoutError(f"nothing moved for {idle:.0f} s")
            if self._timing.wait(future, max(0.0, min(longest_wait, longest_seconds - idle, self._seconds_to_notice(now)))):
                return

    def _seconds_to_notice(self, now: float) -> float:
        """How long until the next notice; reports one that is due."""
        waited = now - (self._progress_at if self._trouble_since is None else self._trouble_since)
        if waited < self._timing.notice_seconds:
            self._notice_after = self._timing.notice_seconds
        if waited >= self._notice_after:
            self._notice_after = 2 * waited
            what = f"{self._action} {self._name or 'objects'} in {self._requests.url}"
            self._requests.notices.report(what, waited, try_number=self.attempt, error=self._trouble)
        return self._notice_after - waited

    def _note_progress(self) -> None:
        self._progress_at = self._timing.clock()


def _timeout_seconds(filesystem: Any) -> float:
    """How long a server may take to answer; s3fs's own default for each part of it."""
    given = [filesystem.config_kwargs.get(name, getattr(filesystem, name)) for name in ("connect_timeout", "read_timeout")]
    return float("inf") if None in given else float(sum(given))

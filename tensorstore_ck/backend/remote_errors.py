"""What all remote backends share: a filesystem object per process, and errors by HTTP status.

Knows fsspec and botocore, no formats. An fsspec filesystem has a thread with an event loop, which a fork does not copy: a child
makes its own. Every error of an fsspec library becomes one of ours here; an unknown one counts as a transient fault, not as an answer.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

from tensorstore_ck.backend.object_names import MISSING_ADVICE
from tensorstore_ck.errors import (
    BackendUnavailableError,
    CorruptObjectError,
    InvalidOptionError,
    InvalidUrlError,
    MissingObjectError,
    NoSpaceError,
    PermissionDeniedError,
    StoreError,
)
from tensorstore_ck.redaction import clean_error, shown_cause, without

PASSING_STATUSES: Final = {408, 409, 425, 429}
FINAL_STATUSES: Final = {501, 505}
"""Of those from 500 on, the replies that would be the same the next time."""
PASSING_CODES: Final = {
    *("BadDigest", "IncompleteBody", "InternalError", "RequestTimeout", "SlowDown"),
    *("Throttling", "ThrottlingException", "XAmzContentSHA256Mismatch"),
}
"""For replies with other statuses, mostly 400."""

_NO_SPACE_CODES: Final = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "InsufficientCapacity"}
_REGION_CODES: Final = {"AuthorizationHeaderMalformed", "PermanentRedirect", "IllegalLocationConstraintException"}
_TOKEN_CODES: Final = {"ExpiredToken", "ExpiredTokenException", "InvalidToken", "TokenRefreshRequired"}
_CREDENTIAL_ERRORS: Final = {
    *("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound", "TokenRetrievalError")
}
_UNREADABLE: Final = "HttpProcessingError"
"""aiohttp's error for a reply that broke off or is not HTTP: its status, 400, came from no server."""
_WHAT_SERVERS_REFUSE: Final = "check storage_options, and what this server says of names (some take no backslash), sizes and headers"
_OPTION_ERRORS: Final = {"ParamValidationError", "NoRegionError", "InvalidEndpointConfigurationError", "UnknownEndpointError"}


class ProcessLocal:
    """Makes a filesystem on first use, and another one after a fork."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._current: tuple[int, Any] | None = None
        self._inherited: list[object] = []

    def get(self) -> Any:
        """This process's filesystem; two threads that call it first at once may make one each, and either works."""
        current = self._current
        if current is None or current[0] != os.getpid():
            # Keeps a reference to the inherited one: closing it here would wait for a thread that only the parent has.
            self._inherited.append(current)
            self._current = current = (os.getpid(), self._make())
        return current[1]

    def close(self) -> None:
        """Drops this process's filesystem, which closes its connections."""
        if self._current is not None and self._current[0] == os.getpid():
            self._current = None


def http_status(exc: BaseException) -> int:
    """The HTTP status of `exc`, or of the error it was translated from; 0 without one."""
    for error in (exc, exc.__cause__):
        if any(kind.__name__ == _UNREADABLE for kind in type(error).__mro__):
            continue
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        status = getattr(error, "status_code", None) or getattr(error, "code", None)
        if isinstance(status, int):
            return status
    return 0


def error_code(exc: BaseException) -> str:
    """The S3 error code of `exc`, or of the error it was translated from; empty without one."""
    for error in (exc, exc.__cause__):
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code", ""))
    return ""


@contextmanager
def remote_errors(action: str, name: str, url: str, secrets: Sequence[str]) -> Iterator[None]:
    """Turns any error raised inside into a `StoreError`, without these secrets."""
    try:
        yield
    except StoreError:
        raise
    except Exception as exc:  # noqa: BLE001 - an error of ours is raised
        # Before `clean_error`, which may replace what it reads.
        error = store_error(exc, f"cannot {action} {name or 'objects'} in {url}", name, secrets)
        clean_error(exc, secrets)
        raise error from shown_cause(exc, secrets)


def store_error(exc: Exception, what: str, name: str, secrets: Sequence[str]) -> StoreError:
    """This package's error for `exc`; `what` begins its message."""
    status, code, kind = http_status(exc), error_code(exc), type(exc).__name__
    text = f"{what}: {without(str(exc) or kind, secrets)}"
    if code == "NoSuchBucket":
        return InvalidUrlError(f"{text}; make the bucket, or correct the URL", object_id=name)
    if code in _NO_SPACE_CODES or status == 507:
        return NoSpaceError(f"{text}; free space or have the quota raised, then try again", object_id=name)
    if code in _REGION_CODES:
        return InvalidOptionError(
            f"{text}; give the bucket's region: client_kwargs={{'region_name': ...}} in storage_options, or AWS_DEFAULT_REGION",
            object_id=name,
        )
    if code == "InvalidObjectState":
        return PermissionDeniedError(
            f"{text}; the object is in an archive: restore it there (`aws s3api restore-object`), and exempt this store from the bucket's "
            "rule that archives objects",
            object_id=name,
        )
    if code in _TOKEN_CODES:
        return PermissionDeniedError(f"{text}; get new credentials, then open the store again", object_id=name)
    if status in (401, 403) or isinstance(exc, PermissionError) or kind in _CREDENTIAL_ERRORS:
        return PermissionDeniedError(f"{text}; check the credentials, the bucket's policy and this host's clock", object_id=name)
    if status == 404 or isinstance(exc, FileNotFoundError):
        return MissingObjectError(f"{text}; {MISSING_ADVICE}", object_id=name)
    if status == 416:
        return CorruptObjectError(f"{text}; the object is shorter than the store says: run `tsck fsck`", object_id=name)
    if isinstance(exc, TypeError | KeyError | ImportError) or kind in _OPTION_ERRORS:
        return InvalidOptionError(f"{text}; check storage_options", object_id=name)
    # the server understood the request and did not carry it out, for a reason that stays
    if status in FINAL_STATUSES or (400 <= status < 500 and status not in PASSING_STATUSES | {412} and code not in PASSING_CODES):
        return PermissionDeniedError(f"{text}; the server refuses this request, and would again: {_WHAT_SERVERS_REFUSE}", object_id=name)
    return BackendUnavailableError(f"{text} ({kind}); check the connection, then try again", object_id=name)

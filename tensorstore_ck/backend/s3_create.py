"""Creates S3 objects, never overwriting one: ``If-None-Match: *``, and what a 412 means.

Every request has the condition, so a bucket policy may deny requests without it. A server that does not support it (`s3_quirks`) gets
this and all later requests without it; other servers may ignore it. `tsck probe` reports which of these a server does.

Each object has a random mark of its upload in its metadata. A request may arrive twice and its reply may be lost, so a 412 may hide our
own success: a HEAD shows it by size and mark. ETags do not: with SSE-KMS they are not a hash of the bytes.
"""

import io
import secrets
from collections.abc import Mapping
from typing import Any, BinaryIO, Final, NamedTuple

from tensorstore_ck.backend.remote_errors import http_status
from tensorstore_ck.backend.s3_quirks import refuses_condition
from tensorstore_ck.backend.s3_requests import OnProgress, Request, S3Requests, is_passing
from tensorstore_ck.errors import BackendUnavailableError, MissingObjectError, StoreError

MARK_KEY: Final = "tsck-upload"

_EXISTS: Final = 412


class NewObject(NamedTuple):
    """An object to create, under a name that was never used."""

    name: str
    key: str
    mark: str
    """The mark in the object's metadata; empty if an earlier version of this package, which used none, began the upload."""


def new_object(name: str, key: str) -> NewObject:
    """The object, with a mark that nobody else knows before it is there."""
    return NewObject(name, key, secrets.token_hex(16))


class UploadedPieces(NamedTuple):
    """A multipart upload whose pieces are all there."""

    upload_id: str
    tags: Mapping[int, str]
    """The tags of the pieces, by number."""
    size_bytes: int
    """Of the object."""


def is_taken(error: StoreError) -> bool:
    """Whether the server refused to create an object because another one has its name."""
    return error.__cause__ is not None and http_status(error.__cause__) == _EXISTS


class S3Creator:
    """Creates the objects of one backend. Thread-safe."""

    def __init__(self, requests: S3Requests) -> None:
        self._requests = requests
        self._without_condition: set[str] = set()
        """Methods for which the server does not support the header."""

    def call(self, action: str, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        """Sends any other request: see `S3Requests.call`."""
        return self._requests.call(action, name, method, **arguments)

    def put(self, new: NewObject, body: BinaryIO) -> None:
        """Creates an object with one request: `body` from its current position.

        Raises:
            BackendUnavailableError: no try succeeded, or another writer's object has the name.
            StoreError: the store refused.
        """
        start = body.tell()
        size_bytes = body.seek(0, io.SEEK_END) - start
        method, operation = "put_object", self._requests.begin("write", new.name)
        while True:
            body.seek(start)
            arguments = {"Key": new.key, "Body": body, "Metadata": {MARK_KEY: new.mark}}
            try:
                operation.repeat(self._requests.request(method, **arguments, **self._condition(method)))
            except StoreError as exc:
                if self._goes_without(method, exc):
                    continue
                if not is_taken(exc):
                    raise
                self._require_own(new, size_bytes, exc)
            return

    def begin(self, new: NewObject) -> str:
        """Begins a multipart upload, and returns its id."""
        arguments: dict[str, Any] = {"Key": new.key, "Metadata": {MARK_KEY: new.mark}}
        return str(self._requests.call("begin an upload of", new.name, "create_multipart_upload", **arguments)["UploadId"])

    def complete(self, new: NewObject, upload: UploadedPieces) -> None:
        """Completes an upload. After a failed try it looks for the object, and sends again only if that is absent.

        Raises:
            BackendUnavailableError: no try succeeded, or another writer's object has the name.
            StoreError: the object is not there, or that is unknown.
        """
        method, operation = "complete_multipart_upload", self._requests.begin("complete", new.name)
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in sorted(upload.tags.items())]
        arguments = {"Key": new.key, "UploadId": upload.upload_id, "MultipartUpload": {"Parts": parts}}
        while True:
            try:
                operation.once(self._requests.request(method, **arguments, **self._condition(method)))
            except StoreError as exc:
                if self._goes_without(method, exc):
                    continue
                if is_taken(exc):
                    self._require_own(new, upload.size_bytes, exc)
                    return
                is_there = operation.poll_outcome(exc, self._is_own(new, upload.size_bytes))
                if is_there is None or not (is_there or is_passing(exc)):
                    raise
                if not is_there:
                    continue
            return

    def has(self, new: NewObject, size_bytes: int) -> bool:
        """Whether the object of this upload, with that size, is there."""
        try:
            return self._requests.begin("look at", new.name).repeat(self._is_own(new, size_bytes))
        except MissingObjectError:
            return False

    def _condition(self, method: str) -> dict[str, str]:
        return {} if method in self._without_condition else {"IfNoneMatch": "*"}

    def _goes_without(self, method: str, error: StoreError) -> bool:
        """Whether `error` says that the server does not support the condition; later requests then leave it out."""
        if method in self._without_condition or not refuses_condition(error):
            return False
        self._without_condition.add(method)
        return True

    def _require_own(self, new: NewObject, size_bytes: int, error: StoreError) -> None:
        """After a 412: returns if the existing object is the one that was sent."""
        if not self.has(new, size_bytes):
            raise BackendUnavailableError(
                f"cannot write {new.name} in {self._requests.url}: an object of that name exists, though the name was new; "
                "try again, with a new name. If it happens again, another writer of this bucket takes the names",
                object_id=new.name,
            ) from error.__cause__

    def _is_own(self, new: NewObject, size_bytes: int) -> Request[bool]:
        async def send(filesystem: Any, _: OnProgress) -> bool:
            reply = await filesystem._call_s3("head_object", Bucket=self._requests.bucket, Key=new.key)
            found = {name.lower(): value for name, value in reply.get("Metadata", {}).items()}  # rclone capitalizes names
            return int(reply["ContentLength"]) == size_bytes and (not new.mark or found.get(MARK_KEY) == new.mark)

        return Request(send)

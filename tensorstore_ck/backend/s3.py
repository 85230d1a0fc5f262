"""An S3 bucket's prefix, through s3fs's raw calls.

Knows S3's requests, no format. Every write is one PutObject, or a multipart upload under a name never used; `create` is a single
PutObject with ``If-None-Match: *``. botocore and aiohttp resend requests whose reply was lost, so a refusal may hide our own
success: a 412 is EXISTS, and whatever is no clear answer is UNKNOWN. Failed requests are repeated by botocore (for about
10 s), and by nobody else; only a reply that breaks off in its body is repeated here.
"""
# ruff: noqa: D102 - protocol.py and resumable.py document the methods

import io
import random
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any, Final

from fsspec.asyn import sync

from tensorstore_ck.backend import s3upload
from tensorstore_ck.backend.names import check_name, check_prefix
from tensorstore_ck.backend.protocol import Buffer, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.backend.remote import ProcessLocal, error_code, http_status, remote_errors
from tensorstore_ck.backend.resumable import Upload
from tensorstore_ck.backend.s3writer import S3Writer
from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError, StoreError, UnsafeBackendError
from tensorstore_ck.room import Space

DELETE_BATCH: Final = 1000
READ_TRIES: Final = 4

_UPLOAD_MARK = "?uploadId="


class _BodyLostError(Exception):
    """A reply broke off while its body was read."""


class S3Backend:
    """Objects as `bucket`/`prefix`/name; `connect` makes an `s3fs.S3FileSystem`, once per process."""

    is_local = False

    def __init__(self, connect: Callable[[], Any], bucket: str, prefix: str) -> None:
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._filesystem = ProcessLocal(lambda: _single_shot(connect()))
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._has_condition = False

    # --- read ---

    def get(self, name: str, *, max_bytes: int) -> bytes:
        async def read(filesystem: Any) -> bytes:
            reply = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=self._key(name))
            async with reply["Body"] as body:
                size = int(reply["ContentLength"])
                if size > max_bytes:
                    raise CorruptObjectError(f"{name} has {size} bytes, more than the {max_bytes} it may have", object_id=name)
                try:
                    data: bytes = await body.read()
                except Exception as exc:
                    raise _BodyLostError from exc
            return data

        found: bytes = self._read(name, read)
        return found

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        async def read(filesystem: Any) -> int:
            span = f"bytes={offset}-{offset + len(target) - 1}"
            reply = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=self._key(name), Range=span)
            done = 0
            async with reply["Body"] as body:
                try:
                    while chunk := await body.read(len(target) - done):
                        target[done : done + len(chunk)] = chunk
                        done += len(chunk)
                except Exception as exc:
                    raise _BodyLostError from exc
            return done

        count = self._read(name, read) if len(target) else 0
        if count < len(target):
            raise CorruptObjectError(f"{name} ends at {offset + count}, before byte {offset + len(target)}", object_id=name)

    def size(self, name: str) -> int:
        return int(self.call("look at", name, "head_object", Key=self._key(name))["ContentLength"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix)
        more: dict[str, str] = {}
        while True:
            page = self.call("list", prefix, "list_objects_v2", Prefix=self._prefix + prefix, **more)
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # some tools make such objects to stand for folders
                    yield ObjectInfo(entry["Key"].removeprefix(self._prefix), entry["Size"], _nanoseconds(entry["LastModified"]))
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def space(self) -> Space | None:
        return None

    # --- write ---

    def put(self, name: str, data: Buffer) -> None:
        self.call("write", name, "put_object", Key=self._key(name), Body=io.BytesIO(data))

    def replace(self, name: str, data: Buffer) -> None:
        self.put(name, data)

    def create(self, name: str, data: Buffer) -> Created:
        key = self._key(name)
        self._require_condition(name)
        try:
            self.call("create", name, "put_object", Key=key, Body=io.BytesIO(data), IfNoneMatch="*")
        except BackendUnavailableError as exc:
            status = http_status(exc.__cause__) if exc.__cause__ else 0
            if status == 501:
                raise UnsafeBackendError(
                    f"{self.url} does not know conditional writes, so commits cannot be exclusive on it", object_id=name
                ) from exc
            return Created.EXISTS if status == 412 else Created.UNKNOWN
        return Created.CREATED

    def sync_folders(self, name: str) -> None:
        check_name(name)

    def open_writer(self, name: str) -> ObjectWriter:
        return S3Writer(self, name, self._key(name))

    def delete(self, names: Iterable[str]) -> None:
        remaining = iter(names)
        while batch := [{"Key": self._key(name)} for name in islice(remaining, DELETE_BATCH)]:
            reply = self.call("delete", "", "delete_objects", Delete={"Objects": batch, "Quiet": True})
            for error in reply.get("Errors", ()):
                if error.get("Code") != "NoSuchKey":
                    key = str(error.get("Key"))
                    # Asked for alone, the object's own status becomes the right error of ours.
                    self.call("delete", key.removeprefix(self._prefix), "delete_object", Key=key)

    def list_uploads(self) -> Iterator[ObjectInfo]:
        more: dict[str, str] = {}
        while True:
            try:
                page = self.call("list the uploads of", "", "list_multipart_uploads", Prefix=self._prefix, **more)
            except StoreError as exc:
                if exc.__cause__ is not None and error_code(exc.__cause__) == "NoSuchUpload":
                    return  # rclone's way to say that there are none
                raise
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(self._prefix):
                    name = upload["Key"].removeprefix(self._prefix) + _UPLOAD_MARK + upload["UploadId"]
                    yield ObjectInfo(name, 0, _nanoseconds(upload["Initiated"]))
            if not page.get("IsTruncated"):
                return
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort_upload(self, name: str) -> None:
        object_name, mark, upload = name.partition(_UPLOAD_MARK)
        if not mark:
            raise CorruptObjectError(f"{name} is not an upload of this store", object_id=name)
        with remote_errors("abort the upload of", name, self.url):
            try:
                self._filesystem.get().call_s3("abort_multipart_upload", Bucket=self._bucket, Key=self._key(object_name), UploadId=upload)
            except Exception as exc:
                if error_code(exc) != "NoSuchUpload" and http_status(exc) != 404:
                    raise

    def begin_upload(self, name: str, size_bytes: int) -> Upload:
        return s3upload.begin(s3upload.Destination(self, name, self._key(name), size_bytes))

    def resume_upload(self, name: str, size_bytes: int, token: str) -> Upload:
        return s3upload.resume(s3upload.Destination(self, name, self._key(name), size_bytes), token)

    def give_up_upload(self, name: str, token: str) -> None:
        if upload_id := s3upload.upload_id_of(token):
            self.abort_upload(name + _UPLOAD_MARK + upload_id)

    def close(self) -> None:
        self._filesystem.close()

    # --- requests ---

    def call(self, action: str, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        """One request on the bucket; `action` and `name` are for messages."""
        with remote_errors(action, name, self.url):
            reply: dict[str, Any] = self._filesystem.get().call_s3(method, Bucket=self._bucket, **arguments)
        return reply

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _read(self, name: str, read: Callable[[Any], Any]) -> Any:
        for attempt in range(READ_TRIES):
            with remote_errors("read", name, self.url):
                filesystem = self._filesystem.get()
                try:
                    return sync(filesystem.loop, read, filesystem)
                except _BodyLostError as exc:
                    lost = exc.__cause__
            time.sleep(random.uniform(0, 0.1 * 4**attempt))  # noqa: S311 - jitter, not a secret
        raise BackendUnavailableError(
            f"cannot read {name} in {self.url}: {lost}; check the connection, then try again", object_id=name
        ) from lost

    def _require_condition(self, name: str) -> None:
        """s3fs drops arguments that botocore does not know: without this check an old botocore would overwrite."""
        if self._has_condition:
            return
        with remote_errors("create", name, self.url):
            members = self._filesystem.get().s3.meta.service_model.operation_model("PutObject").input_shape.members
        if "IfNoneMatch" not in members:
            raise UnsafeBackendError("this botocore does not know conditional writes; run `pip install --upgrade s3fs aiobotocore`")
        self._has_condition = True


def _single_shot(filesystem: Any) -> Any:
    """Leaves all repeating to botocore, which rewinds the body; s3fs on top of it would send what is left of the body: nothing."""
    filesystem.retries = 1
    return filesystem


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000

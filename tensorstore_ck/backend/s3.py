"""An S3 bucket's prefix, through s3fs's raw calls.

Knows S3's requests, no format. Every write is one PutObject, or a multipart upload under a new name. Reads, listings, deletions and
writes under a new name may be sent again after a failure (`s3_requests`). `create` is a PutObject with ``If-None-Match: *``: after a
try whose outcome is unknown it looks for the object, and sends again only if that is absent. A request may arrive twice, so a refusal
may hide our own success: a 412 is EXISTS, and any unclear answer is UNKNOWN.
"""
# ruff: noqa: D102 - protocol.py and resumable_upload.py document the methods

import io
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import islice
from typing import Any, Final

from tensorstore_ck.backend import s3_resumable_upload
from tensorstore_ck.backend.object_names import check_name, check_prefix, is_in
from tensorstore_ck.backend.protocol import Backend, Created, ObjectInfo, ObjectWriter
from tensorstore_ck.backend.remote_errors import ProcessLocal, error_code, http_status, remote_errors
from tensorstore_ck.backend.resumable_upload import Upload
from tensorstore_ck.backend.s3_create import NewObject, S3Creator, new_object
from tensorstore_ck.backend.s3_multipart_writer import S3Writer
from tensorstore_ck.backend.s3_quirks import refuses_batches, refuses_condition
from tensorstore_ck.backend.s3_requests import OnProgress, Request, RetryTiming, S3Requests, is_passing
from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.errors import CorruptObjectError, MissingObjectError, StoreError, UnsafeBackendError
from tensorstore_ck.events import Callback, log_event

DELETE_BATCH: Final = 1000
READ_BYTES: Final = 1 << 20

_UPLOAD_MARK = "?uploadId="

_CONTENT_RANGE: Final = re.compile(r"bytes (?P<start>[0-9]+)-[0-9]+/(?P<size>[0-9]+|\*)$")


class S3Backend(Backend):
    """Objects as `bucket`/`prefix`/name; `connect` makes an `s3fs.S3FileSystem` whose botocore does not retry, once per process.

    `on_wait` is called with an event when a request has waited long, on the thread that waits.
    """

    is_local = False

    def __init__(
        self,
        connect: Callable[[], Any],
        bucket: str,
        prefix: str,
        *,
        timing: RetryTiming | None = None,
        on_wait: Callback = log_event,
        secrets: Sequence[str] = (),
    ) -> None:
        """`secrets`: what messages must not show."""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._filesystem = ProcessLocal(lambda: _single_shot(connect()))
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._has_condition = False
        self._deletes_singly = False
        self._requests = S3Requests(
            url=self.url, bucket=bucket, filesystem=self._filesystem.get, timing=timing or RetryTiming(), on_wait=on_wait, secrets=secrets
        )
        self._creator = S3Creator(self._requests)

    def get(self, name: str, *, max_bytes: int) -> bytes:
        async def read(filesystem: Any, on_progress: OnProgress) -> bytes:
            reply = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=self._key(name))
            async with reply["Body"] as body:
                size = int(reply["ContentLength"])
                if size > max_bytes:
                    raise CorruptObjectError(f"{name} has {size} bytes, more than the {max_bytes} it may have", object_id=name)
                chunks = []
                while chunk := await body.read(READ_BYTES):
                    chunks.append(chunk)
                    on_progress()
            return b"".join(chunks)

        return self._requests.begin("read", name).repeat(Request(read))

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        async def read(filesystem: Any, on_progress: OnProgress) -> int:
            span = f"bytes={offset}-{offset + len(target) - 1}"
            reply = await filesystem._call_s3("get_object", Bucket=self._bucket, Key=self._key(name), Range=span)
            done = 0
            async with reply["Body"] as body:  # first: a reply that is not closed keeps its connection
                there = _bytes_of(reply, offset)
                while chunk := await body.read(len(target) - done):
                    target[done : done + len(chunk)] = chunk
                    done += len(chunk)
                    on_progress()
            if done < min(there, len(target)):
                raise ConnectionError(f"the reply was cut short: {done} of {min(there, len(target))} bytes came")
            return done

        count = self._requests.begin("read", name).repeat(Request(read)) if len(target) else 0
        if count < len(target):
            raise CorruptObjectError(f"{name} ends at {offset + count}, before byte {offset + len(target)}", object_id=name)

    def size(self, name: str) -> int:
        return int(self._requests.call("look at", name, "head_object", Key=self._key(name))["ContentLength"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        for page in self._pages(prefix, Prefix=self._prefix + check_prefix(prefix)):
            for entry in page.get("Contents", ()):
                if not entry["Key"].endswith("/"):  # some tools make such objects to stand for folders
                    stored_ns = _nanoseconds(entry["LastModified"])
                    yield ObjectInfo(entry["Key"].removeprefix(self._prefix), entry["Size"], stored_ns, stored_ns)

    def folders(self, start: str) -> set[str]:
        folders = set[str]()
        for page in self._pages(start, Prefix=self._prefix + check_name(start), Delimiter="/"):
            folders |= {entry["Prefix"].removeprefix(self._prefix).removesuffix("/") for entry in page.get("CommonPrefixes", ())}
        return folders

    def space(self) -> Space | None:
        return None

    def put(self, name: str, data: Buffer) -> None:
        self._creator.put(self._new(name), io.BytesIO(data))

    def replace(self, name: str, data: Buffer) -> None:
        self._requests.call("write", name, "put_object", Key=self._key(name), Body=io.BytesIO(data))

    def create(self, name: str, data: Buffer) -> Created:
        key = self._key(name)
        self._require_condition(name)
        operation = self._requests.begin("create", name)
        put = self._requests.request("put_object", Key=key, Body=io.BytesIO(data), IfNoneMatch="*")
        while True:
            try:
                operation.once(put)
            except StoreError as exc:
                error = exc
            else:
                return Created.CREATED
            status = http_status(error.__cause__) if error.__cause__ else 0
            if status == 412:
                return Created.EXISTS
            if not is_passing(error) and operation.attempt > 1:
                return Created.UNKNOWN  # an earlier try may have made it
            if refuses_condition(error):
                raise UnsafeBackendError(
                    f"{self.url} does not support conditional writes, so commits cannot be exclusive on it: {error.__cause__}",
                    object_id=name,
                ) from error
            if not is_passing(error):
                raise error
            is_there = operation.poll_outcome(error, self._requests.request("head_object", Key=key))
            if is_there is not False:
                return Created.EXISTS if is_there else Created.UNKNOWN

    def sync_folders(self, name: str) -> None:
        check_name(name)

    def open_writer(self, name: str) -> ObjectWriter:
        return S3Writer(self._creator, self._new(name))

    def open_whole_writer(self, name: str) -> ObjectWriter:
        return self.open_writer(name)

    def delete(self, names: Iterable[str]) -> None:
        remaining = iter(names)
        while batch := [self._key(name) for name in islice(remaining, DELETE_BATCH)]:
            for key in self._delete_together(batch):
                with suppress(MissingObjectError):
                    self._requests.call("delete", key.removeprefix(self._prefix), "delete_object", Key=key)

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        more: dict[str, Any] = {}
        while True:
            try:
                page = self._requests.call("list the uploads of", "", "list_multipart_uploads", Prefix=self._prefix, **more)
            except StoreError as exc:
                if exc.__cause__ is not None and error_code(exc.__cause__) == "NoSuchUpload":
                    return  # rclone reports so that there are none
                raise
            for upload in page.get("Uploads", ()):
                if upload["Key"].startswith(self._prefix) and is_in(folders, upload["Key"].removeprefix(self._prefix)):
                    name = upload["Key"].removeprefix(self._prefix) + _UPLOAD_MARK + upload["UploadId"]
                    yield ObjectInfo(name, 0, _nanoseconds(upload["Initiated"]))
            if not page.get("IsTruncated"):
                return
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def abort_upload(self, name: str) -> None:
        object_name, mark, upload = name.partition(_UPLOAD_MARK)
        if not mark:
            raise CorruptObjectError(f"{name} is not an upload of this store", object_id=name)
        with suppress(MissingObjectError):
            self._requests.call("abort the upload of", name, "abort_multipart_upload", Key=self._key(object_name), UploadId=upload)

    def begin_upload(self, name: str, size_bytes: int) -> Upload:
        return s3_resumable_upload.begin(self._creator, name, self._key(name), size_bytes)

    def resume_upload(self, name: str, size_bytes: int, token: str) -> Upload:
        return s3_resumable_upload.resume(self._creator, name=name, key=self._key(name), size_bytes=size_bytes, token=token)

    def give_up_upload(self, name: str, token: str) -> None:
        if upload_id := s3_resumable_upload.upload_id_of(token):
            self.abort_upload(name + _UPLOAD_MARK + upload_id)

    def close(self) -> None:
        self._filesystem.close()

    def _delete_together(self, keys: Sequence[str]) -> Iterable[str]:
        """Deletes objects with one request; returns the keys that need one each, whose status becomes the right error."""
        if self._deletes_singly:
            return keys
        objects = [{"Key": key} for key in keys]
        try:
            reply = self._requests.call("delete", "", "delete_objects", Delete={"Objects": objects, "Quiet": True})
        except StoreError as exc:
            if not refuses_batches(exc):
                raise
            self._deletes_singly = True
            return keys
        return [str(error.get("Key")) for error in reply.get("Errors", ()) if error.get("Code") != "NoSuchKey"]

    def _key(self, name: str) -> str:
        return self._prefix + check_name(name)

    def _pages(self, name: str, **query: Any) -> Iterator[dict[str, Any]]:
        """The replies to a listing, as long as there are more; `name` is for messages."""
        more: dict[str, Any] = {}
        while True:
            page = self._requests.call("list", name, "list_objects_v2", **query, **more)
            yield page
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _new(self, name: str) -> NewObject:
        return new_object(name, self._key(name))

    def _require_condition(self, name: str) -> None:
        """Refuses an old botocore: s3fs drops arguments that botocore does not know, so it would overwrite."""
        if self._has_condition:
            return
        with remote_errors("create", name, self.url, self._requests.secrets):
            members = self._filesystem.get().s3.meta.service_model.operation_model("PutObject").input_shape.members
        if "IfNoneMatch" not in members:
            raise UnsafeBackendError("this botocore does not support conditional writes; run `pip install --upgrade s3fs aiobotocore`")
        self._has_condition = True


def _single_shot(filesystem: Any) -> Any:
    """Turns off the retries of s3fs, which would send a body that has been read already, so an empty one."""
    filesystem.retries = 1
    return filesystem


def _bytes_of(reply: dict[str, Any], offset: int) -> int:
    """How many bytes the object has from `offset` on, as far as the reply to a request for a range says; else 0.

    Raises:
        ConnectionError: it is not that range: a server or proxy ignored or changed the request.
    """
    said = _CONTENT_RANGE.match(str(reply.get("ContentRange")))
    if said is None and offset and reply.get("ResponseMetadata", {}).get("HTTPStatusCode") == 200:
        raise ConnectionError("the server, or a proxy, sent the whole object instead of a range of it")
    if said is not None and int(said["start"]) != offset:
        raise ConnectionError(f"the server, or a proxy, sent another range: {said[0]}, not from byte {offset} on")
    return int(said["size"]) - offset if said is not None and said["size"] != "*" else 0


def _nanoseconds(moment: datetime) -> int:
    return int(moment.timestamp() * 1_000_000) * 1000

"""One large S3 object, uploaded in pieces while it grows.

Pieces are filled in reused buffers under a lock and sent by a few threads, so memory is bounded by `PIECES_IN_FLIGHT` + 1 pieces.
An object that fits into one piece is a single PutObject. A failed piece is final.
"""
# ruff: noqa: D102 - protocol.py documents the methods

import contextlib
import io
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from tensorstore_ck.backend.s3_create import NewObject, S3Creator, UploadedPieces
from tensorstore_ck.common.buffers import Buffer, byte_views
from tensorstore_ck.errors import BackendUnavailableError, StoreError

PIECE_BYTES: Final = 31 << 20
"""A piece takes 32 MiB with the request's own memory. A prefix takes 3,500 requests a second: with half the size 4,096 ranks need 350 s."""
PIECES_IN_FLIGHT: Final = 4
PIECES_OF_ONE_SIZE: Final = 1000  # of the 10,000 that S3 allows: sizes double after each 1,000


class S3Writer:
    """See `ObjectWriter`."""

    def __init__(self, creator: S3Creator, new: NewObject) -> None:
        self._creator = creator
        self._new = new
        self._name = new.name
        self._lock = threading.Lock()
        self._open = True
        self._end = 0
        self._piece = io.BytesIO()
        self._upload_id = ""
        self._sent: list[Future[str]] = []
        self._spare: queue.SimpleQueue[io.BytesIO] = queue.SimpleQueue()
        self._threads: ThreadPoolExecutor | None = None

    def append(self, data: Sequence[Buffer]) -> int:
        with self._lock:
            if not self._open:
                raise BackendUnavailableError(f"{self._name} was closed or aborted while it was written", object_id=self._name)
            offset = self._end
            try:
                for view in byte_views(data):
                    self._add(view)
            except BaseException:
                self._open = False
                raise
            return offset

    def close(self) -> None:
        with self._lock:
            was_open, self._open = self._open, False
            if not was_open:
                raise BackendUnavailableError(f"{self._name} could not be written completely; write it again", object_id=self._name)
            self._piece.truncate()
            if not self._sent:
                self._piece.seek(0)
                self._creator.put(self._new, self._piece)
                return
            if self._piece.tell():
                self._send()
            try:
                tags = {number: sent.result() for number, sent in enumerate(self._sent, 1)}
            finally:
                self._stop_threads()
            self._creator.complete(self._new, UploadedPieces(self._upload_id, tags, self._end))

    def abort(self) -> None:
        with self._lock:
            self._open = False
            self._stop_threads()
            if self._upload_id:
                with contextlib.suppress(StoreError):
                    arguments = {"Key": self._new.key, "UploadId": self._upload_id}
                    self._creator.call("abort", self._name, "abort_multipart_upload", max_tries=1, **arguments)

    def _add(self, view: memoryview) -> None:
        while len(view):
            space = self._piece_bytes() - self._piece.tell()
            self._piece.write(view[:space])
            self._end += min(space, len(view))
            if len(view) < space:
                return
            view = view[space:]
            self._send()
            self._piece = self._next_buffer()

    def _piece_bytes(self) -> int:
        return PIECE_BYTES << (len(self._sent) // PIECES_OF_ONE_SIZE)

    def _send(self) -> None:
        if self._threads is None:
            self._upload_id = self._creator.begin(self._new)
            self._threads = ThreadPoolExecutor(PIECES_IN_FLIGHT, thread_name_prefix="tsck-upload")
        self._sent.append(self._threads.submit(self._upload, len(self._sent) + 1, self._piece))

    def _upload(self, number: int, piece: io.BytesIO) -> str:
        """Runs on a thread; always returns the buffer, for which `append` may wait."""
        try:
            piece.seek(0)
            arguments = {"Key": self._new.key, "UploadId": self._upload_id, "PartNumber": number, "Body": piece}
            reply = self._creator.call("write", self._name, "upload_part", **arguments)
            return str(reply["ETag"])
        finally:
            piece.seek(0)
            self._spare.put(piece)

    def _next_buffer(self) -> io.BytesIO:
        for sent in self._sent[-2 * PIECES_IN_FLIGHT :]:
            if sent.done():
                sent.result()  # a failure aborts the whole object
        return self._spare.get() if len(self._sent) > PIECES_IN_FLIGHT else io.BytesIO()

    def _stop_threads(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)

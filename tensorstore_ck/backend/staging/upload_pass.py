"""One pass over unsent objects: sends pieces of several in parallel, and leaves what cannot be finished now for the next pass.

It leaves objects that another process uploads, and objects whose upload the store has dropped. An object that the store has under its
name may be published: it is compared, and neither deleted nor replaced. Memory: a buffer of one piece per thread.
The rate of uploads is limited here; that of plain reads and writes in `backend.store_backend`.
"""

import io
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Final

from tensorstore_ck.backend.protocol import Backend, finishing, size_if_there
from tensorstore_ck.backend.resumable_upload import NameTakenError, ResumableBackend, Upload, UploadGoneError, UploadPiece, resumable
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.backend.staging.unsent_file import UnsentFile
from tensorstore_ck.backend.staging.upload_journal import JournalEntry
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.retry import RetryPolicy
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.errors import MissingObjectError, StoreError

WRITE_BYTES: Final = 16 << 20
"""Written at once to a store without resumable uploads; the blocks at its ends are read and hashed twice."""

Task = Callable[[], None]


@dataclass
class _Transfer:
    """A resumable upload in progress."""

    file: UnsentFile
    entry: JournalEntry
    upload: Upload
    pieces_left: int
    reported_bytes: int
    is_gone: bool = False


class UploadPass:
    """One pass."""

    def __init__(
        self, folder: StagingFolder, store: Backend, policy: RetryPolicy, limit: RateLimit | None, on_bytes: Callable[[int], object]
    ) -> None:
        self._folder = folder
        self._store = store
        self._policy = policy
        self._limit = limit
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._buffers = threading.local()
        self._open: list[io.FileIO] = []
        self._left: list[str] = []
        self.taken: list[str] = []
        """Objects that need another name: under theirs the store has other bytes, or cannot read them."""

    def run(self, names: Sequence[str], threads: int) -> list[str]:
        """Uploads what it can; returns what is left."""
        try:
            for_each(self._tasks(names), lambda task: task(), threads, failed=self._policy.failed)
        finally:
            _ = [*map(io.FileIO.close, self._open)]  # C code: Ctrl-C between two of them would keep a lock, for which the next pass waits
        return self._left

    def _tasks(self, names: Sequence[str]) -> Iterator[Task]:
        """The tasks, drawn by one thread at a time: an object begins when all pieces of the one before are drawn."""
        pieces = resumable(self._store)
        for name in names:
            file = self._locked(name)
            if file is None:
                continue
            entry = self._folder.journal.read(name) or JournalEntry(name)
            stored_bytes = self._stored_bytes(entry.store_name)
            if stored_bytes is not None:
                yield partial(self._accept_stored, file, entry, stored_bytes)
                continue
            if entry.is_complete:
                entry = entry._replace(token="", is_complete=False)  # the store lost it
            if pieces is None:
                yield partial(self._send_whole, file, entry)
            else:
                yield from self._send_in_pieces(file, entry, self._begin(pieces, file, entry))

    def _locked(self, name: str) -> UnsentFile | None:
        """The object, if it has to be uploaded and this process may upload it."""
        self._policy.check()
        try:
            file = self._folder.open_unsent(name)
        except MissingObjectError as exc:
            entry = self._folder.journal.read(name)
            size = self._stored_bytes(name if entry is None else entry.store_name)
            if size is None:
                raise MissingObjectError(
                    f"the staged {name} is neither on the staging disk nor in the store: it was deleted, or the disk was replaced",
                    object_id=name,
                ) from exc
            self._report(size)  # it was published meanwhile
            return None
        self._open.append(file.raw)
        if file.lock():
            return file
        self._leave(file)
        return None

    def _leave(self, file: UnsentFile) -> None:
        file.close()
        self._left.append(file.name)

    def _accept_stored(self, file: UnsentFile, entry: JournalEntry, stored_bytes: int) -> None:
        """The store has an object of that name, from an earlier try or another process: if it is this one, nothing is left to send."""
        if stored_bytes == file.size_bytes and (entry.is_complete or self._is_same(file, entry.store_name)):
            if not entry.is_complete:
                self._policy.call(lambda: self._store.sync_folders(entry.store_name))
                self._folder.note(entry._replace(is_complete=True))
            self._report(file.size_bytes)
        else:
            file.verify()  # a damaged file is no other object: the store may have it
            self.taken.append(file.name)
        file.close()

    def _is_same(self, file: UnsentFile, store_name: str) -> bool:
        """Whether an object of the store has the file's bytes; False if it cannot be read."""
        staged, stored = (bytearray(min(WRITE_BYTES, file.size_bytes)) for _ in range(2))
        for offset in range(0, file.size_bytes, WRITE_BYTES):
            size = min(WRITE_BYTES, file.size_bytes - offset)
            file.read_into(offset, memoryview(staged)[:size])
            try:
                self._policy.call(partial(self._store.read_into, store_name, offset, memoryview(stored)[:size]))
            except StoreError:
                return False
            if staged[:size] != stored[:size]:
                return False
        return True

    def _begin(self, store: ResumableBackend, file: UnsentFile, entry: JournalEntry) -> Upload:
        name, size, answered = entry.store_name, file.size_bytes, self._policy.call
        if entry.token:
            with suppress(UploadGoneError):
                return answered(lambda: store.resume_upload(name, size, entry.token))
        upload = answered(lambda: store.begin_upload(name, size))
        self._folder.note(entry._replace(token=upload.token))
        return upload

    def _send_in_pieces(self, file: UnsentFile, entry: JournalEntry, upload: Upload) -> Iterator[Task]:
        missing = upload.missing
        transfer = _Transfer(file, entry._replace(token=upload.token), upload, len(missing), reported_bytes=0)
        self._report(file.size_bytes - sum(piece.size_bytes for piece in missing), transfer)
        if not missing:
            yield partial(self._finish, transfer)
        for piece in missing:
            yield partial(self._send_piece, transfer, piece)

    def _send_piece(self, transfer: _Transfer, piece: UploadPiece) -> None:
        def send() -> None:
            self._take_turn(piece.size_bytes)
            transfer.upload.send(piece, self._body(transfer.file, piece))

        if not transfer.is_gone:
            try:
                self._policy.call(send)
                self._report(piece.size_bytes, transfer)
            except (UploadGoneError, NameTakenError):
                transfer.is_gone = True
        with self._lock:
            transfer.pieces_left -= 1
            is_last = not transfer.pieces_left
        if is_last:
            self._finish(transfer)

    def _finish(self, transfer: _Transfer) -> None:
        try:
            if transfer.is_gone:
                raise UploadGoneError
            self._policy.call(transfer.upload.complete)
        except (UploadGoneError, NameTakenError):
            self._report(-transfer.reported_bytes)
            self._folder.note(transfer.entry._replace(token=""))
            self._leave(transfer.file)
        else:
            self._folder.note(transfer.entry._replace(is_complete=True))
            transfer.file.close()

    def _body(self, file: UnsentFile, piece: UploadPiece) -> io.BytesIO:
        body: io.BytesIO | None = getattr(self._buffers, "body", None)
        if body is None:
            body = self._buffers.body = io.BytesIO()
        if body.seek(0, io.SEEK_END) < piece.size_bytes:
            body.seek(piece.size_bytes - 1)
            body.write(b"\0")
        body.truncate(piece.size_bytes)
        with body.getbuffer() as view:
            file.read_into(piece.offset, view)
        body.seek(0)
        return body

    def _send_whole(self, file: UnsentFile, entry: JournalEntry) -> None:
        self._folder.note(entry)
        tries = count()

        def send() -> None:
            if next(tries) and size_if_there(self._store, entry.store_name) is not None:
                raise NameTakenError
            self._write(file, entry.store_name)

        try:
            self._policy.call(send)
        except NameTakenError:
            self._leave(file)
        else:
            self._folder.note(entry._replace(is_complete=True))
            file.close()

    def _write(self, file: UnsentFile, store_name: str) -> None:
        buffer = memoryview(bytearray(min(WRITE_BYTES, file.size_bytes)))
        reported = 0
        try:
            with finishing(self._store.open_whole_writer(store_name)) as writer:
                for offset in range(0, file.size_bytes, WRITE_BYTES):
                    view = buffer[: file.size_bytes - offset]
                    self._take_turn(len(view))
                    file.read_into(offset, view)
                    writer.append([view])
                    self._report(len(view))
                    reported += len(view)
        except BaseException:
            self._report(-reported)
            raise

    def _take_turn(self, size_bytes: int) -> None:
        self._policy.check()
        if self._limit is not None:
            self._limit.wait(size_bytes, self._policy.pause)

    def _stored_bytes(self, store_name: str) -> int | None:
        return self._policy.call(lambda: size_if_there(self._store, store_name))

    def _report(self, count: int, transfer: _Transfer | None = None) -> None:
        with self._lock:
            if transfer is not None:
                transfer.reported_bytes += count
            if count:
                self._on_bytes(count)

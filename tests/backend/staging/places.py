"""A store that takes pieces, in memory; and what a folder holds."""

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tensorstore_ck.backend import s3_resumable_upload
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.resumable_upload import Upload
from tensorstore_ck.backend.s3_create import NewObject, S3Creator, UploadedPieces
from tensorstore_ck.backend.staging.folder import StagingFolder
from tensorstore_ck.backend.staging.upload_journal import UploadJournal
from tensorstore_ck.errors import MissingObjectError
from tests.end_to_end.crash.faulty import Faults, FaultyBackend

UUID = "0c3f3c2a-5a4e-4bb0-8f0e-2f6a3c1d9e11"
PACK, PART = "packs/0A/01ARZ3NDEKTSV4RRFFQ69G5F0A", "parts/0B/01ARZ3NDEKTSV4RRFFQ69G5F0B"


class FakeCreator(S3Creator):
    """Does what `S3Creator` does by `call` alone; nobody else writes here."""

    def __init__(self, call: Callable[..., dict[str, Any]]) -> None:
        self._call = call

    def call(self, action: str, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        return self._call(action, name, method, **arguments)

    def put(self, new: NewObject, body: BinaryIO) -> None:
        self.call("write", new.name, "put_object", Key=new.key, Body=body)

    def begin(self, new: NewObject) -> str:
        return str(self.call("begin", new.name, "create_multipart_upload", Key=new.key)["UploadId"])

    def complete(self, new: NewObject, upload: UploadedPieces) -> None:
        parts = {"Parts": [{"PartNumber": number, "ETag": tag} for number, tag in sorted(upload.tags.items())]}
        self.call("complete", new.name, "complete_multipart_upload", Key=new.key, UploadId=upload.upload_id, MultipartUpload=parts)

    def has(self, new: NewObject, size_bytes: int) -> bool:
        try:
            return int(self.call("look at", new.name, "head_object", Key=new.key)["ContentLength"]) == size_bytes
        except MissingObjectError:
            return False


class PieceStore(MemoryBackend):
    """The requests of S3 that uploads need, on dicts; `sent` counts what was sent of which object, `page` is how many parts are listed."""

    page = 2

    def __init__(self, faults: Faults | None = None) -> None:
        super().__init__()
        self.faults = faults or Faults()
        self.sent: Counter[tuple[str, int]] = Counter()
        self.pending: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count()
        self._counting = threading.Lock()

    def begin_upload(self, name: str, size_bytes: int) -> Upload:
        return s3_resumable_upload.begin(FakeCreator(self.call), name, name, size_bytes)

    def resume_upload(self, name: str, size_bytes: int, token: str) -> Upload:
        return s3_resumable_upload.resume(FakeCreator(self.call), name, name, size_bytes, token)

    def give_up_upload(self, name: str, token: str) -> None:
        self.faults.call(f"give up {name}", lambda: self.pending.pop(s3_resumable_upload.upload_id_of(token), None))

    def size(self, name: str) -> int:
        size: int = self.faults.call(f"size {name}", lambda: super(PieceStore, self).size(name))
        return size

    def call(self, action: str, name: str, method: str, **arguments: Any) -> dict[str, Any]:
        reply: dict[str, Any] = self.faults.call(f"{method} {name}", lambda: getattr(self, f"_{method}")(**arguments))
        return reply

    def _create_multipart_upload(self, Key: str) -> dict[str, Any]:
        upload_id = f"{Key}/{next(self._numbers)}"
        self.pending[upload_id] = {}
        return {"UploadId": upload_id}

    def _upload_part(self, Key: str, UploadId: str, PartNumber: int, Body: Any) -> dict[str, Any]:
        data = Body.read()
        self._pieces(UploadId)[PartNumber] = data
        with self._counting:
            self.sent[Key, PartNumber] += 1
        return {"ETag": str(hash(data))}

    def _list_parts(self, Key: str, UploadId: str, PartNumberMarker: int = 0) -> dict[str, Any]:
        pieces = [item for item in sorted(self._pieces(UploadId).items()) if item[0] > PartNumberMarker]
        listed = [{"PartNumber": number, "Size": len(data), "ETag": str(hash(data))} for number, data in pieces[: self.page]]
        more = len(pieces) > self.page
        return {"Parts": listed, "IsTruncated": more, "NextPartNumberMarker": listed[-1]["PartNumber"] if more else 0}

    def _complete_multipart_upload(self, Key: str, UploadId: str, MultipartUpload: dict[str, Any]) -> dict[str, Any]:
        pieces = self._pieces(UploadId)
        data = b"".join(pieces[part["PartNumber"]] for part in MultipartUpload["Parts"])
        assert [part["ETag"] for part in MultipartUpload["Parts"]] == [str(hash(piece)) for _, piece in sorted(pieces.items())]
        del self.pending[UploadId]
        self.replace(Key, data)
        return {}

    def _put_object(self, Key: str, Body: Any) -> dict[str, Any]:
        self.replace(Key, Body.read())
        self.sent[Key, 1] += 1
        return {}

    def _head_object(self, Key: str) -> dict[str, Any]:
        return {"ContentLength": super().size(Key)}

    def _pieces(self, upload_id: str) -> dict[int, bytes]:
        if upload_id not in self.pending:
            raise MissingObjectError(f"no upload {upload_id}")
        return self.pending[upload_id]


def staging(path: Path, objects: dict[str, bytes], *, capacity_bytes: int = 1 << 30, faults: Faults | None = None) -> StagingFolder:
    """A folder with those objects, unsent; `faults` strike at its journal."""
    folder = StagingFolder(path, UUID, capacity_bytes)
    for name, data in objects.items():
        folder.unsent.put(name, data)
    if faults is not None:
        folder.journal = UploadJournal(FaultyBackend(LocalBackend(folder.path), faults, atomic_put=True))
    return folder


def held(backend: Backend) -> dict[str, bytes]:
    """All objects."""
    return {info.name: backend.get(info.name, max_bytes=info.size_bytes) for info in backend.list("")}


def unsent(folder: StagingFolder) -> set[str]:
    return {info.name for info in folder.unsent.list("")}


def journals(folder: StagingFolder) -> set[str]:
    return {info.name for info in LocalBackend(folder.path).list("uploads/")}

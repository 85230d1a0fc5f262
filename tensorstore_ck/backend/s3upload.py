"""One S3 object, uploaded in pieces that another process can go on with.

Knows S3's requests, no files and no journal: what it takes to go on is the upload's token. Pieces have the sizes that `s3writer` gives
them. An object of one piece is a single PutObject, and has no token.
"""
# ruff: noqa: D102 - resumable.py documents the methods

from collections.abc import Sequence
from typing import Any, BinaryIO, Final, NamedTuple

from tensorstore_ck.backend import s3writer
from tensorstore_ck.backend.remote import error_code
from tensorstore_ck.backend.resumable import Piece, Upload, UploadGoneError
from tensorstore_ck.backend.s3requests import UploadedPieces
from tensorstore_ck.backend.s3writer import Requests
from tensorstore_ck.errors import MissingObjectError, StoreError

_NOT_THE_PIECES: Final = {"InvalidPart", "InvalidPartOrder", "EntityTooSmall", "NoSuchUpload"}


class Destination(NamedTuple):
    """The object to be."""

    requests: Requests
    name: str
    key: str
    size_bytes: int

    def call(self, action: str, method: str, **arguments: Any) -> dict[str, Any]:
        """One request on the object."""
        return self.requests.call(action, self.name, method, Key=self.key, **arguments)

    def is_there(self) -> bool:
        """Whether it is complete."""
        try:
            return int(self.call("look at", "head_object")["ContentLength"]) == self.size_bytes
        except MissingObjectError:
            return False


def begin(destination: Destination) -> Upload:
    """See `ResumableBackend.begin_upload`."""
    pieces = pieces_of(destination.size_bytes, s3writer.PIECE_BYTES)
    if len(pieces) == 1:
        return PutUpload(destination, pieces)
    upload_id = destination.call("begin an upload of", "create_multipart_upload")["UploadId"]
    return MultipartUpload(destination, f"{s3writer.PIECE_BYTES}/{upload_id}", pieces, {})


def resume(destination: Destination, token: str) -> Upload:
    """See `ResumableBackend.resume_upload`."""
    if upload_id_of(token):
        pieces = pieces_of(destination.size_bytes, int(token.partition("/")[0]))
        try:
            tags = _tags(destination, upload_id_of(token), pieces)
        except MissingObjectError:
            pass
        else:
            return MultipartUpload(destination, token, [piece for piece in pieces if piece.number not in tags], tags)
    if destination.is_there():
        return PutUpload(destination, ())
    raise UploadGoneError(f"the upload of {destination.name} is gone")


def upload_id_of(token: str) -> str:
    """The multipart upload's id; empty where there is none."""
    return token.partition("/")[2]


def pieces_of(size_bytes: int, piece_bytes: int) -> list[Piece]:
    """The pieces of an object of that size; an empty object is one empty piece."""
    pieces: list[Piece] = []
    offset = 0
    while offset < size_bytes or not pieces:
        size = min(piece_bytes << (len(pieces) // s3writer.PIECES_OF_ONE_SIZE), size_bytes - offset)
        pieces.append(Piece(len(pieces) + 1, offset, size))
        offset += size
    return pieces


class PutUpload:
    """An object of one piece, or one that is there already."""

    token = ""

    def __init__(self, destination: Destination, missing: Sequence[Piece]) -> None:
        self.missing = missing
        self._destination = destination

    def send(self, piece: Piece, body: BinaryIO) -> None:
        self._destination.call("write", "put_object", Body=body)

    def complete(self) -> None:
        """A PutObject is."""


class MultipartUpload:
    """An object of many pieces."""

    def __init__(self, destination: Destination, token: str, missing: Sequence[Piece], tags: dict[int, str]) -> None:
        """`tags`: of the pieces that are not missing, by number."""
        self.token = token
        self.missing = missing
        self._destination = destination
        self._upload_id = upload_id_of(token)
        self._tags = tags

    def send(self, piece: Piece, body: BinaryIO) -> None:
        try:
            reply = self._destination.call("write", "upload_part", UploadId=self._upload_id, PartNumber=piece.number, Body=body)
        except MissingObjectError as exc:
            raise UploadGoneError(f"the upload of {self._destination.name} is gone") from exc
        self._tags[piece.number] = str(reply["ETag"])

    def complete(self) -> None:
        requests, name, key, size_bytes = self._destination
        try:
            requests.complete(UploadedPieces(name, key, self._upload_id, self._tags, size_bytes))
        except StoreError as exc:
            code = error_code(exc.__cause__) if exc.__cause__ is not None else ""
            if not isinstance(exc, MissingObjectError) and code not in _NOT_THE_PIECES:
                raise
            if not self._destination.is_there():
                raise UploadGoneError(f"the upload of {name} cannot be completed") from exc


def _tags(destination: Destination, upload_id: str, pieces: Sequence[Piece]) -> dict[int, str]:
    """Number -> tag of the pieces that the server has in full."""
    tags: dict[int, str] = {}
    more: dict[str, int] = {}
    while True:
        page = destination.call("look at the upload of", "list_parts", UploadId=upload_id, **more)
        for part in page.get("Parts", ()):
            number = int(part["PartNumber"])
            if 0 < number <= len(pieces) and pieces[number - 1].size_bytes == part["Size"]:
                tags[number] = str(part["ETag"])
        if not page.get("IsTruncated"):
            return tags
        more = {"PartNumberMarker": int(page["NextPartNumberMarker"])}

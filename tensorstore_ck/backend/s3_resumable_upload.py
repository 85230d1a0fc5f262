"""One S3 object, uploaded in pieces, which another process can continue.

Knows S3's requests, no files and no journal: the upload's token is all that it needs to continue. Pieces have the sizes of
`s3_multipart_writer`. An object of one piece is a single PutObject. A token is ``SIZE-MARK/ID``: the size of the pieces, the object's
mark, and the id of the multipart upload, empty without one. Earlier versions used no marks (``SIZE/ID``), and no tokens for single
objects.
"""
# ruff: noqa: D102 - resumable_upload.py documents the methods

from collections.abc import Sequence
from typing import Any, BinaryIO, Final, NamedTuple

from tensorstore_ck.backend import s3_multipart_writer
from tensorstore_ck.backend.remote_errors import error_code
from tensorstore_ck.backend.resumable_upload import NameTakenError, Upload, UploadGoneError, UploadPiece
from tensorstore_ck.backend.s3_create import NewObject, S3Creator, UploadedPieces, is_taken, new_object
from tensorstore_ck.errors import MissingObjectError, StoreError

_NOT_THE_PIECES: Final = {"InvalidPart", "InvalidPartOrder", "EntityTooSmall", "NoSuchUpload"}


class Destination(NamedTuple):
    """The object to create."""

    creator: S3Creator
    new: NewObject
    size_bytes: int

    def call(self, action: str, method: str, **arguments: Any) -> dict[str, Any]:
        """One request on the object."""
        return self.creator.call(action, self.new.name, method, Key=self.new.key, **arguments)

    def is_there(self) -> bool:
        """Whether it is complete."""
        return self.creator.has(self.new, self.size_bytes)

    def token(self, piece_bytes: int, upload_id: str = "") -> str:
        """The token with which another process continues the upload."""
        return f"{piece_bytes}-{self.new.mark}/{upload_id}"


def begin(creator: S3Creator, name: str, key: str, size_bytes: int) -> Upload:
    """See `ResumableBackend.begin_upload`."""
    destination = Destination(creator, new_object(name, key), size_bytes)
    pieces = pieces_of(size_bytes, s3_multipart_writer.PIECE_BYTES)
    if len(pieces) == 1:
        return PutUpload(destination, destination.token(s3_multipart_writer.PIECE_BYTES), pieces)
    upload_id = creator.begin(destination.new)
    return MultipartUpload(destination, destination.token(s3_multipart_writer.PIECE_BYTES, upload_id), pieces, {})


def resume(creator: S3Creator, name: str, key: str, size_bytes: int, token: str) -> Upload:
    """See `ResumableBackend.resume_upload`."""
    piece_bytes, _, mark = token.partition("/")[0].partition("-")
    destination = Destination(creator, NewObject(name, key, mark), size_bytes)
    if upload_id_of(token):
        pieces = pieces_of(size_bytes, int(piece_bytes))
        try:
            tags = _tags(destination, upload_id_of(token), pieces)
        except MissingObjectError:
            pass
        else:
            return MultipartUpload(destination, token, [piece for piece in pieces if piece.number not in tags], tags)
    if destination.is_there():
        return PutUpload(destination, token, ())
    if mark and not upload_id_of(token):  # a sent request may still arrive: its object has this mark
        return PutUpload(destination, token, pieces_of(size_bytes, int(piece_bytes)))
    raise UploadGoneError(f"the upload of {name} is gone")


def upload_id_of(token: str) -> str:
    """The multipart upload's id; empty without one."""
    return token.partition("/")[2]


def pieces_of(size_bytes: int, piece_bytes: int) -> list[UploadPiece]:
    """The pieces of an object of that size; an empty object is one empty piece."""
    pieces: list[UploadPiece] = []
    offset = 0
    while offset < size_bytes or not pieces:
        size = min(piece_bytes << (len(pieces) // s3_multipart_writer.PIECES_OF_ONE_SIZE), size_bytes - offset)
        pieces.append(UploadPiece(len(pieces) + 1, offset, size))
        offset += size
    return pieces


class PutUpload:
    """An object of one piece, or one that is there already."""

    def __init__(self, destination: Destination, token: str, missing: Sequence[UploadPiece]) -> None:
        self.token = token
        self.missing = missing
        self._destination = destination

    def send(self, piece: UploadPiece, body: BinaryIO) -> None:
        try:
            self._destination.creator.put(self._destination.new, body)
        except StoreError as exc:
            if is_taken(exc):
                raise NameTakenError(self._destination.new.name) from exc
            raise

    def complete(self) -> None:
        """Nothing is left to do."""


class MultipartUpload:
    """An object of many pieces."""

    def __init__(self, destination: Destination, token: str, missing: Sequence[UploadPiece], tags: dict[int, str]) -> None:
        """`tags`: the tags of the pieces that are not missing, by number."""
        self.token = token
        self.missing = missing
        self._destination = destination
        self._upload_id = upload_id_of(token)
        self._tags = tags

    def send(self, piece: UploadPiece, body: BinaryIO) -> None:
        try:
            reply = self._destination.call("write", "upload_part", UploadId=self._upload_id, PartNumber=piece.number, Body=body)
        except MissingObjectError as exc:
            raise UploadGoneError(f"the upload of {self._destination.new.name} is gone") from exc
        self._tags[piece.number] = str(reply["ETag"])

    def complete(self) -> None:
        creator, new, size_bytes = self._destination
        try:
            creator.complete(new, UploadedPieces(self._upload_id, self._tags, size_bytes))
        except StoreError as exc:
            if is_taken(exc):
                raise NameTakenError(new.name) from exc
            code = error_code(exc.__cause__) if exc.__cause__ is not None else ""
            if not isinstance(exc, MissingObjectError) and code not in _NOT_THE_PIECES:
                raise
            if not self._destination.is_there():
                raise UploadGoneError(f"the upload of {new.name} cannot be completed") from exc


def _tags(destination: Destination, upload_id: str, pieces: Sequence[UploadPiece]) -> dict[int, str]:
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

"""What a backend may offer beside `Backend`: uploads in pieces that another process can go on with.

Knows no requests and no files. Pieces may be sent in any order, from any thread, and more than once; the object is there, whole, when
`complete` returns, and not before. Names are new and nobody else's, so an object of the right size under one is the right object.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol, cast


class UploadPiece(NamedTuple):
    """A range of an object that travels in one request."""

    number: int
    """Counted from 1."""
    offset: int
    size_bytes: int


class UploadGoneError(Exception):
    """The place has let go of an upload: begin anew. For those who drive uploads; it reaches no caller of theirs."""


class Upload(Protocol):
    """One object on its way."""

    token: str
    """What `resume_upload` takes, in this process or another one."""
    missing: Sequence[UploadPiece]
    """What the place did not have when this upload was begun or resumed."""

    def send(self, piece: UploadPiece, body: BinaryIO) -> None:
        """Sends a missing piece: all that is in `body`, from where it stands.

        Raises:
            UploadGoneError: the place no longer knows this upload.
        """

    def complete(self) -> None:
        """Makes the object, once all missing pieces were sent; if that is done already, does nothing.

        Raises:
            UploadGoneError: the place no longer knows this upload, or not all of its pieces.
        """


class ResumableBackend(Protocol):
    """A backend that takes objects in pieces."""

    def begin_upload(self, name: str, size_bytes: int) -> Upload:
        """Begins an object under a name that was never used."""

    def resume_upload(self, name: str, size_bytes: int, token: str) -> Upload:
        """Goes on with an upload; a complete one misses nothing.

        Raises:
            UploadGoneError: the place does not know it, and the object is not there.
        """

    def give_up_upload(self, name: str, token: str) -> None:
        """Frees what was sent; a complete object stays."""


def resumable(backend: Any) -> ResumableBackend | None:
    """The backend, if it takes uploads in pieces."""
    return cast(ResumableBackend, backend) if hasattr(backend, "begin_upload") else None

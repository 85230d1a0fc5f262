"""The protocol of a backend's resumable uploads: in pieces, which another process can continue.

Knows no requests and no files. Pieces may be sent in any order, from any thread, and more than once; the object is there, whole, when
`complete` returns, and not before. Names are new and unique, so an object of the right size under one is the right object.
"""

from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from tensorstore_ck.backend.forwarding import ForwardingBackend


class UploadPiece(NamedTuple):
    """A range of an object that is sent in one request."""

    number: int
    """From 1."""
    offset: int
    size_bytes: int


class UploadGoneError(Exception):
    """The backend has dropped an upload: begin a new one. The uploader handles it; its callers never see it."""


class NameTakenError(Exception):
    """The store has an object of this name, perhaps the same one. The uploader handles it; its callers never see it."""


class Upload(Protocol):
    """The upload of one object."""

    token: str
    """The argument of `resume_upload`, in this process or another one."""
    missing: Sequence[UploadPiece]
    """The pieces that the backend did not have when this upload was begun or resumed."""

    def send(self, piece: UploadPiece, body: BinaryIO) -> None:
        """Sends a missing piece: `body` from its current position.

        Raises:
            UploadGoneError: the backend no longer has this upload.
            NameTakenError: there is an object that this upload did not make.
        """

    def complete(self) -> None:
        """Makes the object, once all missing pieces are sent; does nothing if that is done already.

        Raises:
            UploadGoneError: the backend no longer has this upload, or not all of its pieces.
            NameTakenError: there is an object that this upload did not make.
        """


class ResumableBackend(Protocol):
    """A backend with resumable uploads."""

    def begin_upload(self, name: str, size_bytes: int) -> Upload:
        """Begins an object under a name that was never used."""

    def resume_upload(self, name: str, size_bytes: int, token: str) -> Upload:
        """Continues an upload; a complete one misses nothing.

        Raises:
            UploadGoneError: the backend does not have it, and the object is not there.
        """

    def give_up_upload(self, name: str, token: str) -> None:
        """Removes the pieces that were sent; a complete object stays."""


def resumable(backend: Any) -> ResumableBackend | None:
    """The backend, or the one that it wraps, if that has resumable uploads."""
    while isinstance(backend, ForwardingBackend):
        backend = backend.inner
    return cast(ResumableBackend, backend) if hasattr(backend, "begin_upload") else None

"""The interface between the store and a backend: bytes by name, and one atomic primitive, `create`.

A backend knows no format. Names are relative, ``/``-separated and made by this package. Every method may be called
from several threads. Errors are this package's: `MissingObjectError` for a name that is not there, `PermissionDeniedError`,
`NoSpaceError`, `BackendUnavailableError`; nothing else escapes. An object is durable once `put`, `create` or `ObjectWriter.close` has
returned.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import NamedTuple, Protocol, TypeVar

from tensorstore_ck.common.buffers import Buffer
from tensorstore_ck.common.free_space import Space
from tensorstore_ck.errors import MissingObjectError


class ObjectInfo(NamedTuple):
    """One listed object."""

    name: str
    size_bytes: int
    modified_ns: int
    stored_ns: int = 0
    """When the store got it, by a clock that its writer cannot set; 0: unknown."""


class Created(Enum):
    """Outcome of a create-if-absent."""

    CREATED = "created"
    """This call made the object (it is durable)."""
    EXISTS = "exists"
    """An object of that name is there, perhaps made by an earlier try of this call: read it to know."""
    UNKNOWN = "unknown"
    """No usable answer came: the object may be there, may come later, or neither. Read it to know."""


class ObjectWriter(Protocol):
    """One object being written, under a name that nobody else uses; visible or orphaned until `close` returns."""

    def append(self, data: Sequence[Buffer]) -> int:
        """Adds the buffers in order, and returns the offset of the first byte. Thread-safe. The buffers may be reused when it returns."""

    def close(self) -> None:
        """Makes everything appended durable under the object's name."""

    def abort(self) -> None:
        """Drops the object, removing what can be removed; never raises."""


def writing(backend: "Backend", name: str) -> AbstractContextManager[ObjectWriter]:
    """A writer of a new object, for a ``with`` block: see `finishing`."""
    return finishing(backend.open_writer(name))


class _Closable(Protocol):
    def close(self) -> None: ...
    def abort(self) -> None: ...


Writer = TypeVar("Writer", bound=_Closable)


@contextmanager
def finishing(writer: Writer) -> Iterator[Writer]:
    """Closes a writer at the end of the ``with`` block, or aborts it where that raises."""
    try:
        yield writer
        writer.close()
    except BaseException:
        writer.abort()
        raise


class Backend(Protocol):
    """A directory or an object-store prefix."""

    url: str
    """For messages: without credentials."""
    is_local: bool
    """Whether a read request is cheap: readers then do not merge ranges."""

    def get(self, name: str, *, max_bytes: int) -> bytes:
        """The whole object; more than `max_bytes` is a `CorruptObjectError`."""

    def get_if_there(self, name: str, *, max_bytes: int) -> bytes | None:
        """As `get`; None if it is not there."""
        try:
            return self.get(name, max_bytes=max_bytes)
        except MissingObjectError:
            return None

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        """Fills `target` (writable, contiguous, bytes) from `offset`; a shorter object is a `CorruptObjectError`."""

    def size(self, name: str) -> int:
        """The object's size in bytes."""

    def put(self, name: str, data: Buffer) -> None:
        """Writes a small object under a name that was never used (local: O_EXCL)."""

    def replace(self, name: str, data: Buffer) -> None:
        """Atomically overwrites an object. Only for derived objects and offline repair."""

    def create(self, name: str, data: Buffer) -> Created:
        """Creates `name` with `data`, whole and durable, only if it is absent; at most one of several callers succeeds."""

    def sync_folders(self, name: str) -> None:
        """Makes the entries of `name`'s folder, and of the folder's parents, durable."""

    def open_writer(self, name: str) -> ObjectWriter:
        """Begins a large object under a name that was never used."""

    def open_whole_writer(self, name: str) -> ObjectWriter:
        """Begins a large object that another process may be writing, too, with the same bytes.

        The object appears whole and durable, or not at all, and never replaces another one: `close` then raises `BackendUnavailableError`.
        `abort` leaves the name alone. A backend without an exclusive create cannot promise that: look for the name before.
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose name begins with `prefix` (``""`` or ending in ``/``), recursively, in no order; none for a missing folder."""

    def folders(self, start: str) -> Collection[str]:
        """The folders at the root whose names begin with `start`, which is not empty; nothing in them, or next to them, is read."""

    def delete(self, names: Iterable[str]) -> None:
        """Deletes objects; names that are not there are skipped."""

    def space(self) -> Space | None:
        """The size of the filesystem and its free space; None if unknown."""

    def list_uploads(self, folders: Collection[str] | None = None) -> Iterator[ObjectInfo]:
        """Leftovers of unfinished writes: multipart uploads, temporaries. ``name`` is the argument of `abort_upload`.

        `folders`: look only at the root itself and in these folders there; what lies elsewhere may be another program's.
        """

    def abort_upload(self, name: str) -> None:
        """Removes a leftover of an unfinished write."""

    def close(self) -> None:
        """Releases connections and descriptors; idempotent."""


def size_if_there(backend: Backend, name: str) -> int | None:
    """The object's size in bytes; None if it is not there."""
    try:
        return backend.size(name)
    except MissingObjectError:
        return None

"""The interface of the host's cache for the log and the block index: an ordered map of bytes with atomic batches.

A table on disk may fail at any call: `TableDamagedError` means that this process can no longer use it, `TableBusyError` that
another process holds its lock. It never returns bytes that were not put. `FailoverTable` replaces it by a table in memory, so
that readers of the log's fold get neither error. Methods may be called from several threads and, for tables on disk, processes;
a batch excludes all other batches.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Final, Protocol

from tensorstore_ck.common.threads import shielded
from tensorstore_ck.errors import RetryableError

MAX_KEY_BYTES: Final = 511
"""LMDB's limit, which every table enforces."""

PAGE_ITEMS: Final = 256
"""Items that a scan reads at once, so that no lock and no transaction is held while the caller works."""

Item = tuple[bytes, bytes]


class CacheWarning(UserWarning):
    """The host's cache does not work as it should; nothing is lost."""


class TableError(RetryableError):
    """The cache on disk did not answer."""


class TableDamagedError(TableError):
    """The cache is damaged, its disk is full or fails, or it belongs to a parent process."""


class TableBusyError(TableError):
    """Another process holds the cache's lock."""


class Reader(Protocol):
    """Reads of a table, or of a batch that sees its own writes."""

    def get(self, key: bytes) -> bytes | None:
        """The value of `key`."""

    def page(self, low: bytes, high: bytes | None, reverse: bool) -> list[Item]:
        """The first `PAGE_ITEMS` of the items with low <= key < high, in order; with `reverse` the last ones, from the end."""

    def scan(self, prefix: bytes, *, reverse: bool = False) -> Iterator[Item]:
        """The items whose keys begin with `prefix`, in order. Read in pages: items put meanwhile may or may not appear."""
        low, high = prefix, prefix_end(prefix)
        while items := self.page(low, high, reverse):
            yield from items
            if len(items) < PAGE_ITEMS:
                return
            if reverse:
                high = items[-1][0]
            else:
                low = items[-1][0] + b"\0"


class Batch(Reader, Protocol):
    """Writes that become visible, and durable, together or not at all."""

    def put(self, key: bytes, value: bytes) -> None:
        """Sets the value of `key`."""

    def delete(self, key: bytes) -> None:
        """Removes `key`, if it is there."""

    def clear(self, prefix: bytes) -> None:
        """Removes every key that begins with `prefix`."""


class Table(Reader, Protocol):
    """An ordered map of bytes."""

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """The values of those `keys` that are there, all as of one moment."""

    def view(self, prefix: bytes) -> Reader:
        """The rows whose keys begin with `prefix`, as they are now: batches do not change them. The caller drops it soon.

        Raises:
            TableError: as its reads.
        """

    def batch(self, *, wait: bool = True) -> AbstractContextManager[Batch]:
        """A batch: committed at the end of the ``with`` block, dropped when that raises.

        Args:
            wait: False: raise `TableBusyError` at once where another process is in a batch.

        Raises:
            TableBusyError: another process is in a batch, and makes no progress.
            TableDamagedError: the batch failed without effect.
        """

    def close(self) -> None:
        """Releases the table; idempotent."""


def write_rows(table: Table, rows: Mapping[bytes, bytes | None]) -> None:
    """Writes rows that can be lost, in one batch; None deletes. Errors of the cache are ignored; Ctrl-C is raised at the end."""

    def write() -> None:
        with suppress(TableError), table.batch() as batch:
            for key, value in rows.items():
                if value is None:
                    batch.delete(key)
                else:
                    batch.put(key, value)

    shielded(write, finish=True)


def bad_key(key: bytes) -> ValueError:
    """The error for a key that some table could not store: a bug of the caller."""
    return ValueError(f"a key has 1 to {MAX_KEY_BYTES} bytes, not {len(key)}")


def prefix_end(prefix: bytes) -> bytes | None:
    """The first key after all that begin with `prefix`; None if there is none."""
    stripped = prefix.rstrip(b"\xff")
    return stripped[:-1] + bytes([stripped[-1] + 1]) if stripped else None

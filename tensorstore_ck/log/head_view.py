"""A read view of the ref table: the fold of the log at one head, even if the cache fails meanwhile."""

from collections.abc import Callable

from tensorstore_ck.log.cache import FailoverReader, Reader, TableError
from tensorstore_ck.log.ref_table import RefTable
from tensorstore_ck.log.table_rows import Head


class HeadView(FailoverReader):
    """The rows at one head. If the cache fails while it is in use, the log is folded again up to that head."""

    def __init__(self, reader: Reader, fold_until: Callable[[Head | None, TableError], Reader]) -> None:
        """`fold_until` returns the fold of the log up to a head, and is given the failure of `reader`.

        Raises:
            CorruptObjectError: the row of the head is damaged.
        """
        self._reader = reader
        self._fold_until = fold_until
        self.head: Head | None = None
        """The entry at which these rows are."""
        self.head = RefTable(self).head()

    def get(self, key: bytes) -> bytes | None:
        """See `Reader.get`: the most frequent call of a save, so that it takes few steps."""
        try:
            return self._reader.get(key)
        except TableError:
            return super().get(key)

    def _current(self) -> Reader:
        return self._reader

    def _leave(self, reader: Reader, cause: TableError) -> None:
        if reader is self._reader:
            folded = self._fold_until(self.head, cause)
            if RefTable(folded).head() != self.head:
                raise cause  # the log was replaced meanwhile
            self._reader = folded

"""`RowKind`: how the rows of one kind are written into the ref table, and decoded strictly. Pure."""

from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

import msgpack

from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.log.cache import Batch
from tensorstore_ck.log.field_checks import MAX_METRICS, MAX_RULE_ITEMS, Field, first_invalid

PREFIX: Final = b"r/"
"""The prefix of the ref table's keys in a host's table. Keys in checkpoints lack it."""

Row = TypeVar("Row", bound=tuple[Any, ...])


class RowKind(Generic[Row]):
    """One kind of row: where its keys begin, what its fields may hold, and the type that callers see."""

    def __init__(self, byte: bytes, row: type[Row], *fields: Field, is_key: Callable[[bytes], bool], named_by_key: int = 0) -> None:
        """`is_key` checks a key after its first byte. `named_by_key`: how many first fields of `row` come from the key."""
        self.prefix = PREFIX + byte
        self.row = row
        self.fields = fields
        self.is_key = is_key
        self._named_by_key = named_by_key

    def decode(self, value: bytes, *named: Any) -> Row:
        """The row of a value; `named` are the fields that its key holds. Raises `CorruptObjectError` if it is not a row of that kind."""
        return self.row(*named, *self.check(value))

    def check(self, value: bytes) -> list[Any]:
        """The fields of a value. Raises `CorruptObjectError` if it is not a row of that kind."""
        try:
            fields = msgpack.unpackb(value, max_array_len=MAX_RULE_ITEMS, max_map_len=MAX_METRICS, max_ext_len=0)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
            fields = None
        if type(fields) is not list or len(fields) != len(self.fields) or first_invalid(self.fields, fields) is not None:
            name = self.row.__name__
            raise CorruptObjectError(f"a {name} of the ref table is malformed: run `tsck fsck`", object_id=name)
        return fields

    def put(self, batch: Batch, key: bytes, row: Row) -> None:
        """Sets a row; `key` without the prefix."""
        start = self._named_by_key
        batch.put(self.prefix + key, pack_body(list(row[start : start + len(self.fields)])))

    def delete(self, batch: Batch, key: bytes) -> None:
        """Removes a row, if it is there; `key` without the prefix."""
        batch.delete(self.prefix + key)

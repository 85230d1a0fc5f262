"""The rows of a kind, in order: one look where they are few, else page by page."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensorstore_ck.log import RefTable
from tensorstore_ck.log.cache import MemoryTable, Table
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table
from tensorstore_ck.log.field_checks import PREFIX
from tensorstore_ck.log.table_rows import NOTES

KEYS = st.lists(st.sampled_from([b"", b"\0", b"a", b"\xfe", b"\xff", b"\xff\xff"]) | st.binary(max_size=3), max_size=6)


@settings(max_examples=60)
@given(
    keys=KEYS,
    prefix=st.sampled_from([b"", b"a", b"\xff", b"\xff\xff"]),
    count=st.sampled_from([0, 1, 254, 255, 256, 257, 511, 512, 513]),
    reverse=st.booleans(),
)
@pytest.mark.parametrize("kind", ["memory", "lmdb"])
def test_every_row_that_begins_with_a_prefix_is_there_once_and_in_order(
    *, kind: str, tmp_path_factory: pytest.TempPathFactory, keys: list[bytes], prefix: bytes, count: int, reverse: bool
) -> None:
    table: Table = MemoryTable() if kind == "memory" else open_lmdb_table(tmp_path_factory.mktemp("table"))
    rows = {*keys, *(prefix + bytes([255] * (number % 3)) + b"%04d" % number for number in range(count))}
    with table.batch() as batch:
        for other in (b"", b"Z", NOTES.prefix[-1:] + b"\xff" * 500, bytes([NOTES.prefix[-1] + 1])):
            batch.put(PREFIX + other, b"value")
        for key in rows:
            batch.put(NOTES.prefix + key, b"value")
    rows.add(b"\xff" * 500)
    expected = [key[len(prefix) :] for key in sorted(rows, reverse=reverse) if key.startswith(prefix)]
    for reader in (table, table.view(PREFIX)):
        assert list(RefTable(reader).scan(NOTES, prefix, reverse=reverse)) == [(key, b"value") for key in expected]
    table.close()

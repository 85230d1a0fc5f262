"""The host's cache: an ordered table of keys and values, in LMDB or in memory.

Knows nothing of stores. A table can always be rebuilt from the store, so losing one loses nothing. Users share a table by the
first two bytes of their keys: ``r/`` is the ref table (see `tensorstore_ck.log`), ``l/`` the log's own bookkeeping, ``b/`` and ``p/``
the block index.

protocol.py           what the log and the block index need of a table
open_cache.py         where a host keeps its cache
lmdb_environment.py   an environment: opens, checks and grows LMDB's files, and locks them
lmdb_table.py         its rows, with their checksums: read, viewed and written in batches, by one of several handles
memory_table.py       a table in memory
failover_table.py     goes from a table on disk that fails or is locked to one in memory, and back
"""

from tensorstore_ck.log.cache.failover_table import FailoverTable
from tensorstore_ck.log.cache.memory_table import MemoryTable
from tensorstore_ck.log.cache.open_cache import open_table
from tensorstore_ck.log.cache.protocol import (
    MAX_KEY_BYTES,
    Batch,
    CacheWarning,
    Reader,
    Table,
    TableBusyError,
    TableDamagedError,
    TableError,
    write_rows,
)

__all__ = [
    "MAX_KEY_BYTES",
    "Batch",
    "CacheWarning",
    "FailoverTable",
    "MemoryTable",
    "Reader",
    "Table",
    "TableBusyError",
    "TableDamagedError",
    "TableError",
    "open_table",
    "write_rows",
]

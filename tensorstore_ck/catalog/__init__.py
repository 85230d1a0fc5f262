"""A relational database of all snapshots of all jobs, filled from the logs of stores.

It can be rebuilt from the stores at any time, and nothing here writes to a store.

catalog.py          class Catalog
results.py          what its methods return
schema.py           the tables
create_tables.py    creates tables, and the views for dashboards
database.py         SQLite or PostgreSQL: connections, transactions, errors
read_entries.py     log entries -> the changes they make
current_refs.py     refs, tags, pins, policies, quotas and states, as the log's cache has them
row_writer.py       changes -> rows
sync.py             one batch of a sync, in one transaction; syncs of several stores at a time
synced_store.py     one store that a catalog follows
private_catalog.py  where a server keeps a catalog of its own
branch_health.py    the usual time between the saves of a branch, and the last runs of gc and fsck
condition_to_sql.py  a parsed condition -> SQL
find_snapshots.py    `find`: the snapshots for which a condition holds
"""

from tensorstore_ck.common.extras import extra

with extra("catalog", "the catalog"):
    import sqlalchemy as _sqlalchemy

from tensorstore_ck.catalog.catalog import Catalog
from tensorstore_ck.catalog.results import CatalogJob, CatalogStore, FoundSnapshot, SyncOutcome, SyncReport

__all__ = ["Catalog", "CatalogJob", "CatalogStore", "FoundSnapshot", "SyncOutcome", "SyncReport"]

del _sqlalchemy

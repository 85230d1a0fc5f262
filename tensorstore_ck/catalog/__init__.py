"""A relational database fed from the logs of stores, for questions over all snapshots of all jobs.

Never the truth: it can be made again from the stores at any time, and nothing here writes to one. Knows a store's log and its fold alone.

database.py            SQLite or PostgreSQL: connections, transactions, errors
schema.py, views.py    what is in it
making.py              makes it, once, whoever comes first
replay.py              entries of a log -> what they say, in memory
feed.py, syncing.py    the same -> rows, one batch a transaction
several.py             several stores at a time
standing.py            what is read from the fold: refs, tags, pins, policies, states
grammar.py             a condition -> its tests
conditions.py, query.py the same -> SQL, and what is found
catalog.py             class Catalog
"""

from tensorstore_ck.common.extras import missing_extra

try:
    import lark as _lark
    import sqlalchemy as _sqlalchemy
except ImportError as exc:
    raise missing_extra("catalog", "the catalog") from exc

from tensorstore_ck.catalog.catalog import Catalog
from tensorstore_ck.catalog.results import CatalogJob, CatalogStore, FoundSnapshot, SyncOutcome, SyncReport

__all__ = ["Catalog", "CatalogJob", "CatalogStore", "FoundSnapshot", "SyncOutcome", "SyncReport"]

del _lark, _sqlalchemy

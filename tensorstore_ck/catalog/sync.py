"""One batch of a sync: locks the store's row, then reads the log, so that two syncs neither interleave nor go backwards.

`sync_several` syncs stores in parallel: a store that cannot be read is reported with its error, and stops none of the others.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final, NamedTuple

from sqlalchemy import Connection, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tensorstore_ck.catalog.create_tables import delete_rows
from tensorstore_ck.catalog.read_entries import EntryEvents
from tensorstore_ck.catalog.results import SyncOutcome, SyncReport
from tensorstore_ck.catalog.row_writer import RowWriter
from tensorstore_ck.catalog.schema import stores
from tensorstore_ck.common.ids import Digest, Ulid
from tensorstore_ck.common.threads import for_each
from tensorstore_ck.errors import InvalidOptionError, StoreError
from tensorstore_ck.log import RefTable
from tensorstore_ck.redaction import display_url
from tensorstore_ck.store import ReadOnlyStore
from tensorstore_ck.store.internals import config_of, log_of

REPLACED: Final = "the store's log is not the one that was read before: the store was restored or salvaged"
REBUILT: Final = "as requested"


class SyncBatch(NamedTuple):
    """The result of one transaction."""

    entries: int
    snapshots: int
    head_n: int
    restart_reason: str
    is_last: bool


def sync_batch(connection: Connection, store: ReadOnlyStore, *, size: int, now_ns: int, from_start: bool = False) -> SyncBatch:
    """Writes up to `size` entries, and the position in the log.

    Raises:
        BrokenLogError: the log is damaged.
    """
    config, log = config_of(store), log_of(store)
    at = _lock_store(connection, config.uuid)
    view = log.newest_view()
    head = view.head()
    newest_n, reason = head.n if head is not None else 0, ""
    if at.head_n:
        before = log.chain.read(at.head_n)
        if from_start or at.log != config.log or before is None or before.hash.hex() != at.head_hash:
            reason = REBUILT if from_start else REPLACED
            delete_rows(connection, at.store_id)
            at = at._replace(head_n=0, head_hash=log.chain.genesis.hex())
    last_n, last_hash = at.head_n, at.head_hash
    events = EntryEvents(at.store_id, lambda n, txn: _is_outcome(view, n, txn), lambda ulid: view.snapshot(ulid) is not None)
    first_hash = Digest(bytes.fromhex(at.head_hash)) if at.head_n else log.chain.genesis
    batches = log.chain.entries(at.head_n, first_hash, at_least=newest_n)
    for entry in islice((entry for batch in batches for entry in batch), min(size, max(0, newest_n - at.head_n))):
        events.add(entry)
        last_n, last_hash = entry.n, entry.hash.hex()
    count = RowWriter(connection, at.store_id).write(events, view)
    values = {"url": store.url, "log": config.log, "head_n": last_n, "head_hash": last_hash, "synced_ns": now_ns}
    connection.execute(update(stores).where(stores.c.store_id == at.store_id).values(values))
    return SyncBatch(entries=last_n - at.head_n, snapshots=count, head_n=last_n, restart_reason=reason, is_last=last_n >= newest_n)


class _Position(NamedTuple):
    """The last entry of a store that was read."""

    store_id: int
    log: str
    head_n: int
    head_hash: str


def _lock_store(connection: Connection, uuid: str) -> _Position:
    """The store's row, locked until the transaction ends."""
    columns = (stores.c.store_id, stores.c.log, stores.c.head_n, stores.c.head_hash)
    query = select(*columns).where(stores.c.uuid == uuid).with_for_update()
    row = connection.execute(query).one_or_none()
    if row is None:
        make = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
        empty = {"uuid": uuid, "url": "", "log": "", "head_n": 0, "head_hash": "", "synced_ns": 0}
        connection.execute(make(stores).values(empty).on_conflict_do_nothing(index_elements=["uuid"]))
        row = connection.execute(query).one()
    return _Position(*row)


def _is_outcome(view: RefTable, n: int, txn: bytes) -> bool:
    outcome = view.outcome(Ulid(txn))
    return outcome is not None and outcome.put and outcome.n == n


PARALLEL: Final = 8
"""Stores that are read at a time: a sync mostly waits for its store."""

OpenStore = Callable[[str], ReadOnlyStore]


def sync_several(
    urls: Sequence[str],
    open_store: OpenStore,
    sync: Callable[[ReadOnlyStore], SyncReport],
    *,
    parallel: int,
    synced: Callable[[SyncOutcome], object],
) -> tuple[SyncOutcome, ...]:
    """The outcomes in the order of `urls`.

    Args:
        urls: The stores.
        open_store: Opens a store.
        sync: Syncs an open store.
        parallel: How many at a time.
        synced: Called with each outcome as soon as it is known, from any thread.
    """
    if parallel < 1:
        raise InvalidOptionError(f"parallel must be a whole number from 1 on, not {parallel}", object_id="parallel")
    outcomes: dict[int, SyncOutcome] = {}

    def sync_one(number: int) -> None:
        try:
            with open_store(urls[number]) as store:
                outcomes[number] = SyncOutcome(display_url(urls[number]), sync(store), None)
        except StoreError as exc:
            outcomes[number] = SyncOutcome(display_url(urls[number]), None, exc)
        synced(outcomes[number])

    for_each(range(len(urls)), sync_one, min(parallel, max(1, len(urls))))
    return tuple(outcomes[number] for number in range(len(urls)))

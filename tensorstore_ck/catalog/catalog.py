"""`Catalog`: a database of all snapshots of all jobs in several stores, filled from their logs."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final, Self

from sqlalchemy import Connection, delete, func, select

from tensorstore_ck.catalog import create_tables
from tensorstore_ck.catalog.branch_health import last_runs
from tensorstore_ck.catalog.current_refs import LIVE
from tensorstore_ck.catalog.database import Database
from tensorstore_ck.catalog.find_snapshots import CheckedQuery, find
from tensorstore_ck.catalog.results import CatalogJob, CatalogStore, FoundSnapshot, SyncOutcome, SyncReport
from tensorstore_ck.catalog.schema import attributes, jobs, metrics, quotas, snapshots, stores
from tensorstore_ck.catalog.sync import PARALLEL, OpenStore, SyncBatch, sync_batch, sync_several
from tensorstore_ck.common.ids import Clock
from tensorstore_ck.common.user_frames import short_errors
from tensorstore_ck.errors import InvalidOptionError, NotFoundError
from tensorstore_ck.log.quota import Quota
from tensorstore_ck.store import ReadOnlyStore, open_store
from tensorstore_ck.store.internals import config_of, log_of

BATCH_ENTRIES: Final = 2000

Progress = Callable[[int, int], None]
"""Called with the number of entries read so far, and of all."""


def _open_read_only(url: str) -> ReadOnlyStore:
    return open_store(url, read_only=True)


@short_errors
class Catalog:
    """Thread-safe; a context manager. It changes nothing in a store, and can be rebuilt from the stores at any time."""

    def __init__(self, url: str | os.PathLike[str], *, batch_entries: int = BATCH_ENTRIES, clock: Clock = time.time_ns) -> None:
        """Connects to nothing yet.

        Args:
            url: ``postgresql://...``, ``sqlite:///...``, or the path of an SQLite file.
            batch_entries: The entries of a log that one transaction writes.
            clock: Returns the current time, for ages and for the time of a sync.
        """
        if batch_entries < 1:
            raise InvalidOptionError("batch_entries must be a whole number from 1 on", object_id="batch_entries")
        self._database = Database(url)
        self._batch_entries = batch_entries
        self._clock = clock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Catalog({self.url!r})"

    @property
    def url(self) -> str:
        """The URL or path of the catalog, without a password."""
        return self._database.shown

    def close(self) -> None:
        """Closes connections; idempotent."""
        self._database.close()

    def sync(self, store: ReadOnlyStore, *, progress: Progress = lambda done, total: None) -> SyncReport:
        """Reads the new entries of the store's log. Several processes may sync at once; after a kill, the next sync continues.

        Raises:
            FormatVersionError: another version made the catalog; see `rebuild`.
            BackendUnavailableError: the database or the store does not answer.
        """
        self._create()
        return self._sync(store, progress, from_start=False)

    def rebuild(self, store: ReadOnlyStore, *, progress: Progress = lambda done, total: None) -> SyncReport:
        """Reads the store's log from its first entry. A catalog of another version is dropped first, with all stores in it."""
        self._create(replaces=True)
        return self._sync(store, progress, from_start=True)

    def sync_all(
        self,
        urls: Sequence[str] | None = None,
        *,
        open_store: OpenStore = _open_read_only,
        parallel: int = PARALLEL,
        rebuild: bool = False,
        synced: Callable[[SyncOutcome], object] = lambda outcome: None,
    ) -> tuple[SyncOutcome, ...]:
        """Syncs several stores in parallel; a store that fails does not stop the others.

        Args:
            urls: The stores; None: all in the catalog.
            open_store: Opens a store; for stores that need more than their URL.
            parallel: How many at a time.
            rebuild: Read their logs from the first entry.
            synced: Called with each outcome as soon as it is known, from any thread.

        Returns:
            The outcomes in the order of `urls`.

        Raises:
            StoreError: the catalog itself cannot be used.
        """
        self._create(replaces=rebuild)
        known = urls if urls is not None else self.known()
        sync = self.rebuild if rebuild else self.sync
        return sync_several(known, open_store, sync, parallel=parallel, synced=synced)

    def forget_store(self, uuid: str) -> None:
        """Removes a store from the catalog, if it is there. Does not change the store."""
        with self._database.writing() as connection:
            if create_tables.has_tables(connection, self.url):
                store_id = connection.execute(select(stores.c.store_id).where(stores.c.uuid == uuid)).scalar_one_or_none()
                if store_id is not None:
                    create_tables.delete_rows(connection, store_id)
                    connection.execute(delete(stores).where(stores.c.store_id == store_id))

    def _create(self, *, replaces: bool = False) -> None:
        """Creates the tables that are missing; `replaces`: first drops a catalog of another version."""
        with self._database.writing() as connection:
            if replaces:
                create_tables.drop_other_version(connection)
            create_tables.create(connection, self.url)

    def _sync(self, store: ReadOnlyStore, progress: Progress, *, from_start: bool) -> SyncReport:
        head_n = log_of(store).sync().n  # before the transaction, which would hold the lock meanwhile
        entries = count = 0
        reason = ""
        while True:
            batch = self._batch(store, from_start=from_start)
            from_start = False
            entries, count, reason = entries + batch.entries, count + batch.snapshots, reason or batch.restart_reason
            progress(batch.head_n, max(head_n, batch.head_n))
            if batch.is_last:
                if entries >= BATCH_ENTRIES:
                    self._database.analyze(snapshots.name, metrics.name, attributes.name)
                return SyncReport(
                    store=config_of(store).uuid, url=store.url, entries=entries, snapshots=count, head_n=batch.head_n, anew=reason
                )

    def _batch(self, store: ReadOnlyStore, *, from_start: bool) -> SyncBatch:
        with self._database.writing() as connection:
            return sync_batch(connection, store, size=self._batch_entries, now_ns=self._clock(), from_start=from_start)

    def find(
        self,
        condition: str = "",
        *,
        order_by: str | None = None,
        descending: bool = False,
        limit: int | None = None,
        offset: int = 0,
        state: str | None = LIVE,
    ) -> tuple[FoundSnapshot, ...]:
        """The snapshots of all stores for which a condition holds, newest first.

        Args:
            condition: Such as ``val_loss < 2.1 and step > 5000 and job like 'gpt%'``; see docs/guides/catalog.md. Empty: all.
            order_by: A field, a metric or an attribute that is a number: lowest first; snapshots without it come last.
            descending: Highest first.
            limit: The most snapshots to return.
            offset: Leave out this many, the first in the order.
            state: ``live``, ``forgotten`` or ``gone``; None: all. Ignored if `condition` tests the state.

        Raises:
            InvalidOptionError: the condition is wrong; the message says where.
            NotFoundError: there is no catalog, or no snapshot has such a metric or attribute.
        """
        query = CheckedQuery.of(
            condition, order_by=order_by, descending=descending, limit=limit, offset=offset, state=state, now_ns=self._clock()
        )
        with self.reading() as connection:
            return find(connection, query)

    @staticmethod
    def metrics_in(condition: str, order_by: str | None = None) -> tuple[str, ...]:
        """The metrics and attributes that a condition and an order use."""
        return CheckedQuery.of(condition, order_by=order_by).metrics

    def synced(self) -> dict[str, int]:
        """URL of each store -> when it was synced last, in nanoseconds since 1970."""
        with self.reading() as connection:
            rows = connection.execute(select(stores.c.url, func.min(stores.c.synced_ns)).group_by(stores.c.url).order_by(stores.c.url))
            return {url: at for url, at in rows}  # noqa: C416 - rows are no pairs for mypy

    def known(self) -> list[str]:
        """The URLs of the stores that were synced; none if there is no catalog yet."""
        try:
            return list(self.synced())
        except NotFoundError:
            return []

    def stores(self) -> tuple[CatalogStore, ...]:
        """The stores, their jobs, and when they were synced."""
        with self.reading() as connection:
            live = func.count().filter(snapshots.c.state == LIVE)
            counted = select(snapshots.c.store_id, snapshots.c.ref, func.count(), live).group_by(snapshots.c.store_id, snapshots.c.ref)
            counts = {(row[0], row[1]): (row[2], row[3]) for row in connection.execute(counted)}
            jobs_by_store: dict[int, list[CatalogJob]] = {}
            for row in connection.execute(
                select(jobs, stores.c.url.label("store")).join(stores, stores.c.store_id == jobs.c.store_id).order_by(jobs.c.ref)
            ):
                fields = row._asdict()
                store_id = fields.pop("store_id")
                job = CatalogJob(**fields, live=counts.get((store_id, row.ref), (0, 0))[1])
                jobs_by_store.setdefault(store_id, []).append(job)
            runs = last_runs(connection)
            limits: dict[int, dict[str, Quota]] = {}
            for row in connection.execute(select(quotas).order_by(quotas.c.glob)):
                limits.setdefault(row.store_id, {})[row.glob] = Quota(row.glob, row.warn_bytes, row.refuse_bytes, row.used_bytes)
            return tuple(
                CatalogStore(
                    uuid=row.uuid,
                    url=row.url,
                    head_n=row.head_n,
                    synced_ns=row.synced_ns,
                    snapshots=sum(count for (store_id, _), (count, _) in counts.items() if store_id == row.store_id),
                    jobs=tuple(jobs_by_store.get(row.store_id, ())),
                    quotas=limits.get(row.store_id, {}),
                    last_runs=runs.get(row.store_id, {}),
                )
                for row in connection.execute(select(stores).order_by(stores.c.url, stores.c.uuid))
            )

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the tables throughout, for queries that no method has.

        Raises:
            NotFoundError: there is no catalog yet.
        """
        with self._database.reading() as connection:
            if not create_tables.has_tables(connection, self.url):
                raise self._database.missing()
            yield connection

"""Creates the tables and views, once for several processes that start together; never changes a table that is not a catalog's."""

import re
import shlex
from collections.abc import Mapping
from typing import Final

from sqlalchemy import Connection, delete, func, insert, inspect, select

from tensorstore_ck.catalog.schema import OF_STORES, VERSION, attributes, catalog_version, metadata, metrics, snapshot_id
from tensorstore_ck.errors import AlreadyExistsError, FormatVersionError

_LOCK: Final = 0x7473636B
"""An advisory lock of PostgreSQL."""


def version_of(connection: Connection) -> int | None:
    """The version of the catalog in the database; None: there is none."""
    if not inspect(connection).has_table(catalog_version.name):
        return None
    return connection.execute(select(catalog_version.c.version)).scalar()


def has_tables(connection: Connection, shown: str) -> bool:
    """Whether there is a catalog of this version.

    Raises:
        FormatVersionError: there is one of another version.
    """
    version = version_of(connection)
    if version not in (None, VERSION):
        raise FormatVersionError(
            f"the catalog in {shown} has version {version}, this build reads and writes version {VERSION}: "
            f"`tsck catalog rebuild STORE --db {shlex.quote(shown)}` replaces it; its other stores are missing until they are synced again",
            object_id=shown,
        )
    return version is not None


def create(connection: Connection, shown: str) -> None:
    """Creates the tables and views, unless they exist.

    Raises:
        AlreadyExistsError: another table has one of their names.
        FormatVersionError: there is a catalog of another version.
    """
    if has_tables(connection, shown):
        return
    _lock(connection)
    if has_tables(connection, shown):
        return
    inspector = inspect(connection)
    taken = sorted({*inspector.get_table_names(), *inspector.get_view_names()} & {*metadata.tables, *VIEWS})
    if taken:
        raise AlreadyExistsError(
            f"{shown} has a table {taken[0]!r} that is not a catalog's: give the catalog its own database, "
            "or a schema (postgresql://.../name?options=-csearch_path%3Dtsck)",
            object_id=taken[0],
        )
    metadata.create_all(connection, checkfirst=False)
    for name in VIEWS:
        connection.exec_driver_sql(create_view(name, connection.dialect.name))
    connection.execute(insert(catalog_version), {"version": VERSION})


def drop_other_version(connection: Connection) -> bool:
    """Drops a catalog of another version; returns whether there was one."""
    _lock(connection)
    if version_of(connection) in (None, VERSION):
        return False
    for name in VIEWS:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
    metadata.drop_all(connection)
    return True


def delete_rows(connection: Connection, store_id: int) -> None:
    """Deletes a store's rows, but not its row in `stores`."""
    for table in (metrics, attributes):
        of_store = table.c.snapshot.between(snapshot_id(store_id, 0, 0), snapshot_id(store_id + 1, 0, 0) - 1)
        connection.execute(delete(table).where(of_store))
    for table in OF_STORES:
        connection.execute(delete(table).where(table.c.store_id == store_id))


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))


_TIME: Final = {
    "sqlite": "strftime('%Y-%m-%dT%H:%M:%SZ', {0} / 1000000000, 'unixepoch')",
    "postgresql": "to_timestamp({0} / 1000000000.0)",
}
"""In PostgreSQL a time is a `timestamptz`; in SQLite, which has no such type, a text such as `2026-01-31T12:00:00Z`."""
_JOINED: Final = {"sqlite": "group_concat({0}, ', ')", "postgresql": "string_agg({0}, ', ' ORDER BY {0})"}

VIEWS: Final[Mapping[str, str]] = {
    "snapshot_overview": """
        SELECT st.url AS store, s.ref, s.job, s.step, <time s.time_ns> AS time, s.state, s.logical_bytes, s.new_bytes, s.mark, s.reason,
            (SELECT <joined t.name> FROM tags t WHERE t.store_id = s.store_id AND t.ulid = s.ulid) AS tags,
            (SELECT count(*) FROM pins p WHERE p.store_id = s.store_id AND p.ulid = s.ulid) AS pins,
            s.root, s.ulid, s.actor, s.time_ns
        FROM snapshots s JOIN stores st ON st.store_id = s.store_id""",
    "job_overview": """
        SELECT st.url AS store, j.ref, j.job, j.puts, j.processes, j.first_step, j.last_step, <time j.first_time_ns> AS first_time,
            <time j.last_time_ns> AS last_time, j.logical_bytes, j.new_bytes,
            (SELECT count(*) FROM snapshots s WHERE s.store_id = j.store_id AND s.ref = j.ref AND s.state = 'live') AS live
        FROM jobs j JOIN stores st ON st.store_id = j.store_id""",
    "metric_history": """
        SELECT st.url AS store, s.ref, s.job, s.step, <time s.time_ns> AS time, m.name AS metric, m.value, s.state, s.root, s.time_ns
        FROM metrics m JOIN snapshots s ON s.id = m.snapshot JOIN stores st ON st.store_id = s.store_id""",
    "pinned": """
        SELECT st.url AS store, s.ref, s.job, s.step, p.owner, p.reason, <time p.time_ns> AS since, <time p.expires_ns> AS expires,
            s.logical_bytes, s.root
        FROM pins p JOIN stores st ON st.store_id = p.store_id JOIN snapshots s ON s.store_id = p.store_id AND s.ulid = p.ulid""",
    "storage_by_job": """
        SELECT st.url AS store, s.ref, s.job, s.state, count(*) AS snapshots, sum(s.new_bytes * 1.0) AS new_bytes
        FROM snapshots s JOIN stores st ON st.store_id = s.store_id GROUP BY st.url, s.ref, s.job, s.state""",
    "gc_history": """
        SELECT st.url AS store, g.n, <time g.time_ns> AS time, g.actor, g.condemned_packs, g.swept_packs, g.swept_parts,
            g.swept_snapshots, g.rescued_packs, g.relocated_packs, g.purged_windows, g.settled_n, g.time_ns
        FROM gc_runs g JOIN stores st ON st.store_id = g.store_id""",
    "report_history": """
        SELECT st.url AS store, r.n, <time r.time_ns> AS time, r.actor, r.run, r.outcome, r.duration_ns / 1000000000.0 AS duration_seconds,
            r.counts, r.message, r.time_ns
        FROM reports r JOIN stores st ON st.store_id = r.store_id""",
    "event_history": """
        SELECT st.url AS store, e.n, e.position, <time e.time_ns> AS time, e.actor, e.op, e.ref, e.root, e.detail, e.time_ns
        FROM events e JOIN stores st ON st.store_id = e.store_id""",
}


def create_view(name: str, dialect: str) -> str:
    """The statement that creates a view."""
    forms = {"time": _TIME[dialect], "joined": _JOINED[dialect]}
    body = re.sub(r"<(\w+) ([\w.]+)>", lambda match: forms[match[1]].format(match[2]), VIEWS[name])
    return f"CREATE VIEW {name} AS {body}"

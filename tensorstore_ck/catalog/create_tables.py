"""Creates the tables, once for several processes that start together; never changes a table that is not a catalog's."""

import shlex
from typing import Final

from sqlalchemy import Connection, delete, func, insert, inspect, select

from tensorstore_ck.catalog.schema import OF_STORES, VERSION, attributes, catalog_version, metadata, metrics, snapshot_id
from tensorstore_ck.catalog.views import VIEWS, create_view
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

"""Makes the tables, once, whoever of several processes comes first; and never touches what is not a catalog's."""

from typing import Final

from sqlalchemy import Connection, delete, func, insert, inspect, select

from tensorstore_ck.catalog.schema import OF_STORES, VERSION, catalog_version, metadata, metrics, snapshot_id
from tensorstore_ck.catalog.views import VIEWS, create_view
from tensorstore_ck.errors import AlreadyExistsError, FormatVersionError

_LOCK: Final = 0x7473636B
"""Of PostgreSQL's advisory ones."""


def version_of(connection: Connection) -> int | None:
    """Which version of the catalog is there; None: none."""
    if not inspect(connection).has_table(catalog_version.name):
        return None
    return connection.execute(select(catalog_version.c.version)).scalar()


def is_made(connection: Connection, shown: str) -> bool:
    """Whether there is a catalog that this build can use.

    Raises:
        FormatVersionError: there is another one.
    """
    found = version_of(connection)
    if found not in (None, VERSION):
        raise FormatVersionError(
            f"the catalog in {shown} has version {found}, this build makes and reads version {VERSION}: "
            "`tsck catalog rebuild` makes it anew, without the other stores in it until they are synced again",
            object_id=shown,
        )
    return found is not None


def make(connection: Connection, shown: str) -> None:
    """Makes the tables and views, unless they are there.

    Raises:
        AlreadyExistsError: something else has one of their names.
        FormatVersionError: there is a catalog of another version.
    """
    if is_made(connection, shown):
        return
    _lock(connection)
    if is_made(connection, shown):
        return
    inspector = inspect(connection)
    taken = sorted({*inspector.get_table_names(), *inspector.get_view_names()} & {*metadata.tables, *VIEWS})
    if taken:
        raise AlreadyExistsError(
            f"{shown} has a table {taken[0]!r} that is no catalog's: give the catalog a database of its own, "
            "or a schema (postgresql://.../name?options=-csearch_path%3Dtsck)",
            object_id=taken[0],
        )
    metadata.create_all(connection, checkfirst=False)
    for name in VIEWS:
        connection.exec_driver_sql(create_view(name, connection.dialect.name))
    connection.execute(insert(catalog_version), {"version": VERSION})


def drop_if_other(connection: Connection) -> bool:
    """Drops a catalog of another version; whether there was one."""
    _lock(connection)
    if version_of(connection) in (None, VERSION):
        return False
    for name in VIEWS:
        connection.exec_driver_sql(f"DROP VIEW IF EXISTS {name}")
    metadata.drop_all(connection)
    return True


def forget_store(connection: Connection, store_id: int) -> None:
    """Deletes a store's rows, but not where it was read up to."""
    its = metrics.c.snapshot.between(snapshot_id(store_id, 0, 0), snapshot_id(store_id + 1, 0, 0) - 1)
    connection.execute(delete(metrics).where(its))
    for table in OF_STORES:
        connection.execute(delete(table).where(table.c.store_id == store_id))


def _lock(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))

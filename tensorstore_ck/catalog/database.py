"""SQLite or PostgreSQL: transactions that read or write, and errors as `StoreError`.

SQLite keeps its rollback journal: a write-ahead log corrupts a file that several hosts share. Readers wait while a batch is committed.
"""

import os
import shlex
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from sqlalchemy import URL, Connection, create_engine, event, exc, make_url

from tensorstore_ck.common.extras import extra
from tensorstore_ck.errors import (
    BackendUnavailableError,
    CorruptObjectError,
    InvalidUrlError,
    NoSpaceError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
)
from tensorstore_ck.redaction import display_url, secret_values, without

BUSY_SECONDS: Final = 60
CONNECT_SECONDS: Final = 10
_NOT_OPENED: Final = ("unable to open", "authentication failed", "pg_hba.conf", "does not exist", "no password supplied")
"""Texts of errors of SQLite and PostgreSQL that a retry does not resolve; psycopg has no codes for them."""
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_WRITES: Final = "tsck_writes"
_DRIVERS: Final = {
    "sqlite": "sqlite",
    "postgresql": "postgresql+psycopg",
    "postgres": "postgresql+psycopg",
    "postgresql+psycopg": "postgresql+psycopg",
}


class Database:
    """One database. Thread-safe; connects with the first transaction."""

    def __init__(self, url: str | os.PathLike[str]) -> None:
        """`url`: ``postgresql://...``, ``sqlite:///...``, or the path of a file."""
        self._url = _parsed(url)
        self.is_sqlite: Final = self._url.drivername == "sqlite"
        self.shown: Final = (
            str(self._url.database)
            if self.is_sqlite
            else display_url(self._url.set(drivername="postgresql").render_as_string(hide_password=True))
        )
        """The URL or path for messages. Values of its query are hidden, not left out: that would be another connection."""
        password = [str(self._url.password)] if self._url.password else []
        self._secrets: Final = [*password, *secret_values(self._url.query)]
        arguments: dict[str, Any]
        if self.is_sqlite:
            arguments = {"connect_args": {"timeout": BUSY_SECONDS}}
        else:
            arguments = {
                "pool_pre_ping": True,
                "max_overflow": -1,
                "connect_args": {"connect_timeout": CONNECT_SECONDS, "application_name": "tsck catalog"},
            }
        self._write_lock: AbstractContextManager[object] = threading.RLock() if self.is_sqlite else nullcontext()
        """Held by the thread of this process that writes: SQLite's own lock is not fair, and gives up after `BUSY_SECONDS`."""
        with extra("postgres", "a catalog in PostgreSQL"):
            self._engine = create_engine(self._url, **arguments)
        if self.is_sqlite:
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin_sqlite)

    def exists(self) -> bool:
        """False: SQLite's file does not exist."""
        return not self.is_sqlite or Path(self.shown).exists()

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """A transaction that sees one state of the database throughout.

        Raises:
            NotFoundError: SQLite's file does not exist.
            CorruptObjectError: the file is damaged.
        """
        if not self.exists():
            raise self.missing()
        try:
            with self._store_errors(), self._engine.connect() as connection:
                if not self.is_sqlite:
                    connection = connection.execution_options(isolation_level="REPEATABLE READ")
                with connection.begin():
                    yield connection
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            if not self.is_sqlite:
                raise
            raise self._damaged() from error  # SQLite returns what a file holds, whatever types the columns have

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        """A transaction that is committed at the end; in SQLite the only one that writes."""
        if self.is_sqlite:
            self._create_file()
        with self._store_errors(), self._write_lock, self._engine.connect() as connection:
            connection = connection.execution_options(**{_WRITES: True})
            with connection.begin():
                yield connection

    def analyze(self, *tables: str) -> None:
        """Updates the statistics of PostgreSQL's planner, which does so itself only minutes later."""
        if not self.is_sqlite:
            with self.writing() as connection:
                connection.exec_driver_sql(f"ANALYZE {', '.join(tables)}")

    def close(self) -> None:
        """Closes connections; idempotent."""
        self._engine.dispose()

    def missing(self) -> NotFoundError:
        """The error where there is no catalog yet."""
        return NotFoundError(
            f"there is no catalog in {self.shown}: `tsck catalog sync STORE --db {shlex.quote(self.shown)}` makes one", object_id=self.shown
        )

    def _create_file(self) -> None:
        folder = Path(self.shown).parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.exists():
                os.close(os.open(self.shown, _CREATE, 0o600))  # SQLite would create it readable by others, and through a link
        except OSError as error:
            raise PermissionDeniedError(f"cannot create the catalog {self.shown}: {error.strerror}", object_id=str(folder)) from error

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            raise self._store_error(error) from error
        except UnicodeDecodeError as error:  # SQLite quotes a damaged file in its message
            raise self._damaged() from error
        except (exc.SQLAlchemyError, sqlite3.Error) as error:
            raise StoreError(f"the catalog {self.shown} failed: {self._words(error)}", object_id=self.shown) from error

    def _store_error(self, error: exc.DBAPIError) -> StoreError:
        words, state = self._words(error.orig), getattr(error.orig, "sqlstate", None)
        if state == "42501" or "readonly database" in words:
            return PermissionDeniedError(f"the catalog {self.shown} denies access: {words}", object_id=self.shown)
        if state == "42P01" or "no such table" in words:
            return BackendUnavailableError(f"another process is rebuilding the catalog {self.shown}: try again", object_id=self.shown)
        if state == "53100" or "disk is full" in words:
            return NoSpaceError(f"the catalog {self.shown} has no free space: {words}", object_id=self.shown)
        if "not a database" in words or "malformed" in words:
            return self._damaged()
        if isinstance(error, exc.OperationalError) and any(text in words for text in _NOT_OPENED):
            return PermissionDeniedError(f"the catalog {self.shown} cannot be opened: {words}", object_id=self.shown)
        if isinstance(error, exc.OperationalError | exc.InterfaceError) or error.connection_invalidated:
            return BackendUnavailableError(
                f"the database {self.shown} does not answer, or is busy ({words}): try again", object_id=self.shown
            )
        return StoreError(f"the catalog {self.shown} failed: {words}", object_id=self.shown)

    def _damaged(self) -> CorruptObjectError:
        return CorruptObjectError(
            f"{self.shown} is not an SQLite file, or is damaged: name another, or delete it and run "
            f"`tsck catalog sync STORE --db {shlex.quote(self.shown)}`",
            object_id=self.shown,
        )

    def _words(self, error: object) -> str:
        """The database's message on one line, without the password."""
        return without(" ".join(str(error).split()), self._secrets)


def _parsed(url: str | os.PathLike[str]) -> URL:
    text = os.fspath(url)
    if "://" not in text:
        return URL.create("sqlite", database=os.path.abspath(text))
    scheme = text.partition("://")[0].lower()
    if scheme not in _DRIVERS:
        raise InvalidUrlError(f"a catalog cannot be in {scheme}://: give the path of a file, or postgresql://...", object_id=scheme)
    try:
        parsed = make_url(text).set(drivername=_DRIVERS[scheme])
    except (exc.ArgumentError, ValueError):
        raise InvalidUrlError(
            "not a URL of a database, which looks like postgresql://user:password@host:5432/name", object_id=scheme
        ) from None
    if scheme != "sqlite":
        return parsed
    if parsed.database in (None, "", ":memory:") or parsed.query:
        raise InvalidUrlError("a catalog in SQLite is a file: sqlite:///catalog.sqlite, or its path", object_id=scheme)
    return parsed.set(database=os.path.abspath(str(parsed.database)))


def _prepare_sqlite(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # `_begin_sqlite` begins transactions, not the driver
    connection.execute("PRAGMA case_sensitive_like = ON")  # as in PostgreSQL
    connection.execute("PRAGMA cache_size = -65536")  # a batch that exceeds the cache is written before its commit, which locks readers out


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get(_WRITES) else "BEGIN")

"""Catalogs in SQLite and in a real PostgreSQL, each empty, for every test that asks for `url`."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy

from tests.catalog import server

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    if server.program("postgres") is None or server.program("initdb") is None:
        pytest.skip("needs PostgreSQL: apt-get install postgresql")
    with server.postgres() as url:
        engine = sqlalchemy.create_engine(url.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:  # a locale that sorts otherwise than by bytes
            connection.exec_driver_sql("CREATE DATABASE tsck TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en' LOCALE 'C'")
        engine.dispose()
        yield url.replace("/postgres?", "/tsck?")


@pytest.fixture
def new_schema(postgres: str) -> Callable[[], str]:
    """Makes URLs of empty schemas in the database."""

    def make() -> str:
        name = f"t{next(_numbers)}"
        engine = sqlalchemy.create_engine(postgres.replace("postgresql://", "postgresql+psycopg://"), isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            connection.exec_driver_sql(f"CREATE SCHEMA {name}")
        engine.dispose()
        return f"{postgres}&options=-csearch_path%3D{name}"

    return make


@pytest.fixture(params=["sqlite", "postgresql"])
def new_url(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], str]:
    """Makes URLs of empty databases of one kind."""
    if request.param == "postgresql":
        make: Callable[[], str] = request.getfixturevalue("new_schema")
        return make
    numbers = itertools.count()
    return lambda: str(tmp_path / f"catalog{next(numbers)}.sqlite")


@pytest.fixture
def url(new_url: Callable[[], str]) -> str:
    return new_url()

"""Where a catalog can be and where not, what is said when it cannot, and plain SQL."""

import importlib
import json
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tensorstore_ck.catalog import Catalog
from tensorstore_ck.catalog.create_tables import VIEWS
from tensorstore_ck.catalog.database import Database
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.errors import (
    AlreadyExistsError,
    BackendUnavailableError,
    CorruptObjectError,
    InvalidOptionError,
    InvalidUrlError,
    MissingExtraError,
    NotFoundError,
    PermissionDeniedError,
    StoreError,
)
from tensorstore_ck.log import Op
from tests.catalog.made import publish
from tests.gc.stores import AT_ONCE, open_store, state


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://root:sekret@host/db", "cannot be in mysql://"),
        ("postgresql+asyncpg://u:sekret@host/db", "cannot be in"),
        ("sqlite://", "is a file"),
        ("sqlite:///:memory:", "is a file"),
        ("sqlite:///x?mode=ro", "is a file"),
        ("postgresql://u:sekret@host:port/db", "not a URL of a database"),
    ],
)
def test_urls_that_name_no_catalog(url: str, message: str) -> None:
    with pytest.raises(InvalidUrlError, match=message) as caught:
        Catalog(url)
    assert "sekret" not in str(caught.value)
    with pytest.raises(InvalidOptionError):
        Catalog("x", batch_entries=0)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_password_is_never_shown(scheme: str) -> None:
    for url in (f"{scheme}://ada:sekret@127.0.0.1:1/db", f"{scheme}://ada@127.0.0.1:1/db?password=sekret"):
        with Catalog(url) as catalog, pytest.raises(BackendUnavailableError, match="does not answer") as caught:
            catalog.find()
        assert "sekret" not in str(caught.value) + repr(catalog) + catalog.url
        assert "127.0.0.1" in catalog.url
        assert caught.value.object_id == catalog.url


def test_a_printed_url_without_its_query_is_refused(postgres: str) -> None:
    """Without what is hidden of it, it would be another connection, or one that verifies nothing."""
    with Catalog(f"{postgres}&sslmode=disable") as catalog, pytest.raises(NotFoundError, match="there is no catalog in") as caught:
        catalog.find()
    assert catalog.url.endswith("/tsck?host=***&sslmode=***")
    (printed,) = re.findall(r"--db '(\S+)'`", str(caught.value))
    with Catalog(printed) as another, pytest.raises(StoreError, match="sslmode"):
        another.find()


def test_a_path_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store()
    monkeypatch.chdir(tmp_path)
    for url in (tmp_path / "a.sqlite", "a.sqlite", "sqlite:///a.sqlite", f"sqlite:///{tmp_path}/a.sqlite"):
        with Catalog(url) as catalog:
            catalog.sync(store)
    assert list(tmp_path.iterdir()) == [tmp_path / "a.sqlite"]
    with Catalog("new/folder/b.sqlite") as catalog:
        catalog.sync(store)
    (tmp_path / "file").touch()
    with Catalog("file/c.sqlite") as catalog, pytest.raises(PermissionDeniedError, match="cannot create the catalog"):
        catalog.sync(store)


def test_what_cannot_be_opened(postgres: str, tmp_path: Path) -> None:
    for url in (tmp_path, postgres.replace("/tsck?", "/nope?"), postgres.replace("tsck@", "nobody@")):
        with Catalog(url) as catalog, pytest.raises(PermissionDeniedError, match="cannot be opened"):
            catalog.sync(open_store())


def test_a_new_catalog_is_not_made_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "c.sqlite").symlink_to(tmp_path / "elsewhere")
    with Catalog(tmp_path / "c.sqlite") as catalog, pytest.raises(PermissionDeniedError, match=r"cannot create the catalog .*c\.sqlite"):
        catalog.sync_all(())
    assert not (tmp_path / "elsewhere").exists()


def test_asking_makes_nothing(tmp_path: Path) -> None:
    with Catalog(tmp_path / "none.sqlite") as catalog:
        for ask in (catalog.find, catalog.stores, catalog.synced):
            with pytest.raises(NotFoundError, match=r"`tsck catalog sync STORE --db .*` makes one"):
                ask()
    assert not list(tmp_path.iterdir())


def test_an_empty_database_is_no_catalog(url: str) -> None:
    Database(url).close()
    if "://" not in url:
        sqlite3.connect(url).close()
    with Catalog(url) as catalog, pytest.raises(NotFoundError, match="there is no catalog"):
        catalog.find()


def test_an_empty_store(url: str) -> None:
    with Catalog(url) as catalog:
        assert catalog.sync(open_store()).head_n == 0
        assert catalog.find() == ()
        assert [store.jobs for store in catalog.stores()] == [()]


def test_what_others_made_is_left_alone(url: str) -> None:
    database = Database(url)
    with database.writing() as connection:
        connection.exec_driver_sql("CREATE TABLE jobs (mine INTEGER)")
        connection.exec_driver_sql("INSERT INTO jobs VALUES (7)")
    with Catalog(url) as catalog:
        for fill in (catalog.sync, catalog.rebuild):
            with pytest.raises(AlreadyExistsError, match="table 'jobs' that is not a catalog's"):
                fill(open_store())
    with database.reading() as connection:
        assert connection.exec_driver_sql("SELECT mine FROM jobs").scalar_one() == 7
    database.close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_bytes(b"not a database, but long enough to be looked at" * 100)
    with Catalog(tmp_path / "x.sqlite") as catalog:
        for ask in (catalog.find, lambda: catalog.sync(open_store())):
            with pytest.raises(CorruptObjectError, match="not an SQLite file"):
                ask()


def test_a_file_whose_tables_are_no_text(tmp_path: Path) -> None:
    """SQLite quotes them in its own words."""
    file = tmp_path / "x.sqlite"
    with Catalog(file) as catalog:
        catalog.sync(open_store())
    file.write_bytes(file.read_bytes().replace(b"CREATE TABLE", b"CREATE \x9eABLE", 1))
    with Catalog(file) as catalog, pytest.raises(CorruptObjectError, match="or is damaged"):
        catalog.find()


def test_a_file_whose_words_are_none(tmp_path: Path) -> None:
    """SQLite holds anything in any column."""
    file, store = tmp_path / "x.sqlite", open_store()
    store.put_snapshot(state(1), ref="job", step=1, metrics={"loss": 1.0})
    with Catalog(file) as catalog:
        catalog.sync(store)
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE metrics SET name = x'00ff'")
    with Catalog(file) as catalog, pytest.raises(CorruptObjectError, match="or is damaged"):
        catalog.find("accuracy > 1")


def test_a_database_that_is_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.catalog.database.BUSY_SECONDS", 0)
    with Catalog(tmp_path / "x.sqlite") as catalog:
        catalog.sync(open_store())
        with catalog._database.writing():
            assert catalog.find() == (), "who reads does not wait"
            with pytest.raises(BackendUnavailableError, match="busy"):
                catalog.sync(open_store())


def test_a_role_that_may_only_read(postgres: str, new_schema: Callable[[], str]) -> None:
    url, store = new_schema(), open_store()
    publish(store, "runs/a", 1, {"loss": 1})
    with Catalog(url) as catalog:
        catalog.sync(store)
        with catalog._database.writing() as connection:
            connection.exec_driver_sql("DROP ROLE IF EXISTS viewer")
            connection.exec_driver_sql("CREATE ROLE viewer LOGIN")
            schema = connection.exec_driver_sql("SELECT current_schema()").scalar_one()
            connection.exec_driver_sql(f"GRANT USAGE ON SCHEMA {schema} TO viewer")
            connection.exec_driver_sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO viewer")
    with Catalog(url.replace("tsck@", "viewer@")) as catalog:
        assert len(catalog.find("loss = 1")) == 1
        with pytest.raises(PermissionDeniedError):
            catalog.sync(store)
    with Catalog(url) as catalog, catalog._database.writing() as connection:
        connection.exec_driver_sql("DROP OWNED BY viewer")
        connection.exec_driver_sql("DROP ROLE viewer")


@pytest.mark.parametrize(("module", "extra"), [("sqlalchemy", "catalog"), ("psycopg", "postgres")])
def test_without_a_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    for name in [name for name in sys.modules if name.startswith("tensorstore_ck.catalog")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=rf"pip install 'tensorstore_ck\[{extra}\]'"):
        importlib.import_module("tensorstore_ck.catalog").Catalog("postgresql://host/db")


def test_views_and_tables_in_plain_sql(url: str) -> None:
    store = open_store()
    for step in (1, 2, 3):
        store.put_snapshot(state(step), ref="runs/gpt", step=step, metrics={"loss": 3.0 - step, "nan": float("nan")})
    store.tag("v1", "runs/gpt@2")
    store.tag("best", "runs/gpt@2")
    store.pin("runs/gpt@1", owner="ada", reason="eval", expires="7d")
    store.set_policy("runs/*", keep_last=5)
    store.set_quota("runs/*", warn="1GB")
    store.set_quota("gone", refuse=0)
    store.remove_quota("gone")
    store.branch("exp/x", "runs/gpt@1")
    store.forget("exp/x")
    store.put_snapshot(state(9), ref="gone", step=9)
    store.forget("gone")
    store.gc(AT_ONCE)
    with Catalog(url) as catalog:
        catalog.sync(store)

        def ask(sql: str) -> list[dict[str, Any]]:
            with catalog._database.reading() as connection:
                return [dict(row._mapping) for row in connection.exec_driver_sql(sql)]

        for name in VIEWS:
            assert ask(f"SELECT * FROM {name}"), name
        (two,) = ask("SELECT * FROM snapshot_overview WHERE step = 2")
        assert (two["state"], two["pins"], sorted(two["tags"].split(", "))) == ("live", 0, ["best", "v1"])
        assert str(two["time"])[:4] == "20" + str(two["time"])[2:4]
        assert [row["value"] for row in ask("SELECT value FROM metric_history WHERE metric = 'loss' ORDER BY step")] == [2.0, 1.0, 0.0]
        assert ask("SELECT value FROM metric_history WHERE metric = 'nan' AND step = 1") == [{"value": None}]
        assert ask("SELECT state, snapshots FROM storage_by_job WHERE ref = 'gone'") == [{"state": "gone", "snapshots": 1}]
        (pin,) = ask("SELECT * FROM pinned")
        assert (pin["owner"], pin["reason"], pin["step"]) == ("ada", "eval", 1)
        (job,) = ask("SELECT * FROM job_overview WHERE job = 'gpt'")
        assert (job["puts"], job["live"], job["first_step"], job["last_step"], job["processes"]) == (3, 3, 1, 3, 1)
        assert json.loads(ask("SELECT rules FROM policies")[0]["rules"]) == {"keep_last": 5}
        assert [row["name"] for row in ask("SELECT name FROM refs")] == ["runs/gpt"]
        swept = ask("SELECT sum(swept_snapshots) AS snapshots, sum(swept_packs) AS packs, sum(purged_windows) AS windows FROM gc_history")
        assert [int(swept[0][name]) for name in ("snapshots", "packs", "windows")] == [1, 1, 2]
        (noted,) = ask("SELECT run, outcome, counts FROM report_history")
        assert (noted["run"], noted["outcome"], json.loads(noted["counts"])["deleted_snapshots"]) == ("gc", "ok", 1)
        assert catalog.stores()[0].last_runs == store.last_runs()
        assert catalog.stores()[0].quotas == store.quotas()
        assert store.quotas()["runs/*"].used_bytes > 15_000
        store.fsck()
        store.gc(AT_ONCE)
        catalog.sync(store)
        assert catalog.stores()[0].last_runs == store.last_runs()
        assert [row["run"] for row in ask("SELECT run FROM reports ORDER BY n")] == ["gc", "fsck", "gc"]
        events = ask("SELECT op, ref, detail FROM event_history ORDER BY n, position")
        assert [event["op"] for event in events][:10] == ["put", "put", "put", "tag", "tag", "pin", "policy", "quota", "quota", "quota"]
        assert json.loads(events[5]["detail"])["owner"] == "ada"
        (freed,) = ask("SELECT freed_n FROM snapshots WHERE ref = 'gone'")
        assert freed["freed_n"] in [row["n"] for row in ask("SELECT n FROM gc_runs WHERE swept_snapshots = 1")]
        counted = ask("SELECT count(*) AS n FROM events WHERE op = 'put' AND detail LIKE '%%counted%%'")
        assert counted == [{"n": 0}]


def test_a_save_that_does_not_count(url: str) -> None:
    store = open_store()
    publish(store, "runs/a", 1)
    (op,) = next(iter(store.engine.log.entries())).ops
    store.engine.log.append(lambda _: [op, op])
    with Catalog(url) as catalog:
        assert catalog.sync(store).snapshots == 1
        with catalog._database.reading() as connection:
            events = connection.exec_driver_sql("SELECT detail FROM events ORDER BY n, position").scalars()
            assert [json.loads(detail).get("counted", True) for detail in events] == [True, False, False]


def test_a_ulid_that_is_published_twice(url: str) -> None:
    store = open_store()
    for ref in ("runs/a", "runs/b"):
        publish(store, ref, 1, {ref: 1.0})
    first, second = (entry.ops[0].fields for entry in store.engine.log.entries())
    again = Op({**second, "snapshot": first["snapshot"], "txn": new_ulid()})
    with Catalog(url) as catalog:
        catalog.sync(store)
        store.engine.log.append(lambda _: [again, Op({**again.fields, "txn": new_ulid()})])
        catalog.sync(store)
        found = catalog.find(state=None)
        assert [(each.ref, dict(each.metrics)) for each in found] == [("runs/b", {"runs/b": 1.0})] * 2
        catalog.rebuild(store)
        assert catalog.find(state=None) == found


def test_sorting_goes_by_bytes_in_both(url: str) -> None:
    store = open_store()
    for ref in ("b", "B", "a-b", "a.b", "aa", "a/b", "A"):
        publish(store, ref)
    with Catalog(url) as catalog:
        catalog.sync(store)
        assert [each.ref for each in catalog.find(order_by="ref")] == sorted(("b", "B", "a-b", "a.b", "aa", "a/b", "A"))
        assert [each.ref for each in catalog.find("ref like 'a%'", order_by="ref")] == ["a-b", "a.b", "a/b", "aa"]

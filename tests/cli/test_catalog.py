"""catalog and find, as a user runs them."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tensorstore_ck.cli import options as command_options
from tensorstore_ck.errors import BackendUnavailableError
from tests.cli.conftest import Tsck

pytest.importorskip("sqlalchemy")


@pytest.fixture
def catalog(history: Tsck, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tsck:
    """With no catalog yet, whose default location is in a folder of the test."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("TSCK_CATALOG", raising=False)
    return history


def test_sync_find_and_show(catalog: Tsck, tmp_path: Path) -> None:
    asked = catalog("find", "val_loss < 3")
    assert (asked.code, "`tsck catalog sync STORE --db " in asked.err) == (25, True)
    synced = catalog("catalog", "sync")
    assert synced.code == 0, synced
    assert "2 entries read, 2 snapshots, up to entry 2" in synced.out
    assert (tmp_path / "data" / "tensorstore_ck" / "catalog.sqlite").exists()

    found = catalog("find", "val_loss < 2.4 and step >= 1 and job like 'gpt%'")
    header, row, count, as_of = found.out.splitlines()
    assert header.split() == ["REF", "STEP", "TIME", "(UTC)", "SIZE", "NEW", "val_loss", "ROOT"]
    assert row.split()[:2] == ["runs/gpt", "2"]
    assert "2.25" in row
    assert count == "1 snapshot"
    assert "as of 2" in as_of
    assert "`tsck catalog sync` adds newer ones" in as_of

    catalog("tag", "v1", "runs/gpt~1")
    catalog("mark", "runs/gpt~1", "--reason", "diverged")
    assert "no snapshot matches" in catalog("find", "tag = 'v1'").out
    assert "2 entries read, 0 snapshots, up to entry 4" in catalog("catalog", "sync").out
    line = catalog("find", "tag = 'v1'", "--sort", "val_loss", "--desc").out.splitlines()[1]
    assert "bad: diverged" in line
    assert " v1 " in line

    shown = catalog("catalog").out
    assert "2 snapshots in 1 job" in shown
    assert "runs/gpt" in shown
    assert "1 to 2" in shown


def test_several_stores(catalog: Tsck) -> None:
    catalog("init", "other")
    catalog("put", "model.safetensors", "--ref", "exp/b", "--metric", "val_loss=1", store="other")
    synced = catalog("catalog", "sync", "ck", "other", "--db", "all.sqlite", "--json").json
    assert [store["snapshots"] for store in synced["stores"]] == [2, 1]
    found = catalog("find", "val_loss <= 2.25", "--sort", "val_loss", "--db", "all.sqlite")
    assert [line.split()[0].rpartition("/")[2] for line in found.out.splitlines()[:3]] == ["STORE", "other", "ck"]
    as_json = catalog("find", "val_loss is not null", "-n", "2", "--db", "all.sqlite", "--json").json
    assert len(as_json["found"]) == 2
    assert as_json["more"]
    assert as_json["found"][0]["metrics"] == {"val_loss": 1.0}
    assert len(as_json["synced"]) == 2
    assert "... and more: -n 2 shows them" in catalog("find", "-n", "1", "--db", "sqlite:///all.sqlite").out
    rebuilt = catalog("catalog", "rebuild", "other", "--db", "all.sqlite").out
    assert "1 entry read, 1 snapshot, up to entry 1; read from the start: as requested" in rebuilt
    assert len(catalog("catalog", "show", "--db", "all.sqlite", "--json").json["stores"]) == 2


def test_a_store_that_cannot_be_read_stops_no_other(catalog: Tsck, tmp_path: Path) -> None:
    for name in ("one", "two", "broken"):
        catalog("init", name)
        catalog("put", "model.safetensors", "--ref", "exp/b", store=name)
    (entry,) = [path for path in (tmp_path / "broken" / "log").rglob("*") if path.is_file()]
    entry.chmod(0o600)
    entry.write_bytes(b"garbage")
    (tmp_path / "cache").rename(tmp_path / "gone")

    synced = catalog("catalog", "sync", "one", "nowhere", "broken", "two", "ck")
    assert synced.code == 43, synced
    assert [line.partition(": ")[2].partition(":")[0] for line in sorted(synced.err.splitlines())] == ["broken", "nowhere"]
    assert "there is no store at" in synced.err
    assert synced.out.count(" read, ") == 3
    assert synced.out.splitlines()[-3:-1] == ["3 of 5 stores synced; failed: nowhere, broken", "exit code 43: broken_log"]
    assert catalog("catalog", "sync", "one", "nowhere", "two").code == 30

    as_json = catalog("catalog", "sync", "one", "nowhere", "broken", "--json")
    assert (as_json.code, as_json.err) == (43, "")
    assert [store["entries"] for store in as_json.json["stores"]] == [0]
    assert [(each["store"], each["kind"]) for each in as_json.json["failed"]] == [("nowhere", "not_a_store"), ("broken", "broken_log")]
    assert len(catalog("catalog", "show", "--json").json["stores"]) == 3


def test_without_arguments_all_that_is_known_is_synced(catalog: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = catalog("catalog", "sync", store=None)
    assert (nothing.code, "which store?" in nothing.err) == (30, True)
    catalog("init", "other")
    assert catalog("catalog", "sync", "ck", "other").code == 0
    for name in ("ck", "other"):
        catalog("put", "model.safetensors", "--ref", "exp/new", store=name)
    assert sorted(store["snapshots"] for store in catalog("catalog", "sync", "--json", store=None).json["stores"]) == [1, 1]
    assert catalog("catalog", "sync", store=None).out.splitlines()[-2] == "2 stores synced"
    assert len(catalog("catalog", "sync", "-s", "ck", "--json").json["stores"]) == 1
    assert len(catalog("catalog", "rebuild", "--json", store=None).json["stores"]) == 2
    catalog("init", "third")
    assert len(catalog("catalog", "sync", "--json", store="third").json["stores"]) == 3
    monkeypatch.chdir(tmp_path / "other")
    assert len(catalog("catalog", "sync", "--json", store=None).json["stores"]) == 3


SECRET = ("--storage-option", "password=hunter2")
OTHERS = (
    "ftp://evil/x",
    "s3://ours-evil/x",
    "s3a://evil/x",
    "s3://ours?endpoint_url=evil/x",
    "s3://ours#evil/x",
    "simplecache::s3://ours/x",
    "sftp://ours@evil/x",
    "s3://ours/../x",
)
OURS = ("s3://ours/ck", "s3://ours/other/deep/")


@pytest.fixture
def opened(catalog: Tsck, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """URL -> the storage options with which it was opened; nothing but the store ck can be."""
    assert catalog("catalog", "sync", "--db", "c.sqlite").code == 0
    found: dict[str, Any] = {}

    def note(url: str, *, storage_options: dict[str, Any], **_: object) -> NoReturn:
        found[url] = storage_options
        raise BackendUnavailableError(f"{url} does not answer", object_id=url)

    monkeypatch.setattr(command_options, "open_engine", note)
    return found


def lead_to(url: str) -> None:
    """What somebody else who may write to the catalog does."""
    with closing(sqlite3.connect("c.sqlite")) as connection, connection:
        connection.execute("UPDATE stores SET url = ?", (url,))


@pytest.mark.parametrize("named", ["s3://ours/ck", None])
def test_storage_options_go_only_to_buckets_that_the_command_names(catalog: Tsck, opened: dict[str, Any], named: str | None) -> None:
    for url in (*OTHERS, *OURS):
        lead_to(url)
        told = catalog("catalog", "sync", "--db", "c.sqlite", *SECRET, store=named).err
        is_ours = url in OURS and named is not None
        assert opened[url] == ({"password": "hunter2"} if is_ours else {}), url
        assert ("without the storage options" in told) is not is_ours
    assert not named or opened[named] == {"password": "hunter2"}


def test_pages_open_what_a_catalog_names_without_the_storage_options(
    catalog: Tsck, opened: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ui = pytest.importorskip("tensorstore_ck.ui")

    def open_all(sources: Any, *_: object, **__: object) -> None:
        with sources.catalog.reading() as connection:
            (uuid,) = connection.exec_driver_sql("SELECT uuid FROM stores").scalars()
        for opening in (sources.open, sources.writable):
            with pytest.raises(BackendUnavailableError):
                opening(sources.key(uuid))

    monkeypatch.setattr(ui, "make_app", open_all)
    monkeypatch.setattr(ui, "serve", lambda *_: None)
    for url in (*OTHERS, *OURS):
        lead_to(url)
        assert catalog("ui", "--no-browser", "--allow", "tag", "--db", "c.sqlite", *SECRET, store=None).code == 0
        assert opened[url] == {}, url
        assert catalog("ui", "--no-browser", "--allow", "tag", "--db", "c.sqlite", *SECRET, store="s3://ours/ck").code == 0
        assert opened[url] == ({"password": "hunter2"} if url in OURS else {}), url


def test_what_was_let_go(catalog: Tsck) -> None:
    catalog("forget", "runs/gpt@1")
    catalog("catalog", "sync")
    assert catalog("find").out.count("runs/gpt") == 1
    everything = catalog("find", "--all").out
    assert everything.count("runs/gpt") == 2
    assert "forgotten" in everything
    assert "forgotten" in catalog("find", "state = 'forgotten'").out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("find", "val_loss <"), 22, "ends too early"),
        (("find", "val_los < 1"), 25, "did you mean val_loss?"),
        (("find", "--sort", "nope"), 25, "has a metric or an attribute 'nope'"),
        (("find", "--desc"), 2, "--desc is for --sort"),
        (("find", "-n", "0"), 2, "-n"),
        (("catalog", "sync", "nowhere"), 30, "there is no store"),
        (("catalog", "show", "ck"), 2, "for the whole catalog"),
        (("catalog", "drop"), 2, "drop"),
        (("catalog", "sync", "--parallel", "0"), 2, "--parallel"),
        (("catalog", "sync", "--db", "postgresql://u:sekret@127.0.0.1:1/d"), 13, "does not answer"),
    ],
)
def test_what_cannot_be_done(catalog: Tsck, arguments: tuple[str, ...], code: int, message: str) -> None:
    catalog("catalog", "sync")
    result = catalog(*arguments)
    assert (result.code, message in result.err) == (code, True), result
    assert "sekret" not in result.err + result.out

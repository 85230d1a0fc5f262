"""Snapshots in MLflow, with a tracking database on disk and with a server."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.integrations.trackers import FREE_ALL, REF, restored, save, state
from tests.servers import SECRET, S3Server, mlflow_tracking

mlflow = pytest.importorskip("mlflow", reason="needs mlflow-skinny, the extra mlflow")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),  # SQLAlchemy's, of MLflow's tables
]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``mlflow.db``, an experiment and its artifacts."""
    folder = tmp_path_factory.mktemp("mlflow")
    client = mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db")
    client.create_experiment("snapshots", artifact_location=(folder / "artifacts").as_uri())
    return folder


@pytest.fixture
def tracking(database: Path) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_TRACKING_URI", "")  # that `set_tracking_uri` sets
        mlflow.set_tracking_uri(f"sqlite:///{database}/mlflow.db")
        mlflow.set_experiment("snapshots")
        yield database
        mlflow.end_run()
        mlflow.set_tracking_uri(None)


def logged_files(run_id: str, path: str = "") -> dict[str, Any]:
    """Path -> content of a run's artifacts."""
    found: dict[str, Any] = {}
    for each in mlflow.MlflowClient().list_artifacts(run_id, path):
        found |= logged_files(run_id, each.path) if each.is_dir else {each.path: mlflow.artifacts.load_dict(f"runs:/{run_id}/{each.path}")}
    return found


def test_a_run_gives_back_the_snapshot_that_it_logged_last(tracking: Path, store: tsck.Store) -> None:
    save(store, 1)
    with mlflow.start_run() as run:
        tsck.mlflow.log_snapshot(store, REF)
        last = tsck.mlflow.log_snapshot(store, save(store, 2))
        here = tsck.mlflow.find_snapshot()
    found = tsck.mlflow.find_snapshot(run.info.run_id)
    assert found == here == (store.url, last.root)
    with tsck.open(found.store, read_only=True) as again:
        assert restored(again, found.address) == 2


def test_each_snapshot_of_a_run_is_found_at_its_step(tracking: Path, store: tsck.Store) -> None:
    with mlflow.start_run() as run:
        roots = [tsck.mlflow.log_snapshot(store, save(store, step)).root for step in (1, 2)]
    found = [tsck.mlflow.find_snapshot(run.info.run_id, f"{REF}@{step}") for step in (1, 2)]
    assert [each.address for each in found] == roots
    with pytest.raises(tsck.NotFoundError, match=r"has not logged 'runs/gpt@3', but runs/gpt@1, runs/gpt@2"):
        tsck.mlflow.find_snapshot(run.info.run_id, f"{REF}@3")
    with pytest.raises(tsck.NotFoundError, match="no snapshots there"):
        tsck.mlflow.find_snapshot(run.info.run_id, "other/gpt@1")
    for malformed in ("../gpt@1", "runs//gpt@1", "", "abcdef12"):
        with pytest.raises(tsck.InvalidNameError, match="is not an address"):
            tsck.mlflow.find_snapshot(run.info.run_id, malformed)


def test_what_a_run_shows(tracking: Path, store: tsck.Store) -> None:
    snapshot = save(store, 5)
    with mlflow.start_run() as run:
        tsck.mlflow.log_snapshot(store, snapshot)
    url = f"tsck://{snapshot.root}::{store.url}"
    shown = {"store": store.url, "address": snapshot.root, "ref": REF, "step": 5, "url": url}
    assert logged_files(run.info.run_id) == {"snapshots/runs/gpt@5.json": shown}
    (found,) = mlflow.search_runs(
        experiment_names=["snapshots"], filter_string=f"tags.\"tsck.root\" = '{snapshot.root}'", output_format="list"
    )
    tags = {key: value for key, value in found.data.tags.items() if key.startswith("tsck")}
    assert found.info.run_id == run.info.run_id
    assert tags == {"tsck.store": store.url, "tsck.root": snapshot.root, "tsck.ref": REF, "tsck.step": "5"}


def test_a_snapshot_without_a_step(tracking: Path, store: tsck.Store) -> None:
    with mlflow.start_run() as run:
        tsck.mlflow.log_snapshot(store, save(store, 1))
        snapshot = tsck.mlflow.log_snapshot(store, save(store, None))
    run_id = run.info.run_id
    assert tsck.mlflow.find_snapshot(run_id).address == tsck.mlflow.find_snapshot(run_id, snapshot.root).address == snapshot.root
    assert mlflow.get_run(run_id).data.tags["tsck.step"] == ""


def test_another_run_by_its_id(tracking: Path, store: tsck.Store) -> None:
    with mlflow.start_run() as run:
        pass
    snapshot = tsck.mlflow.log_snapshot(store, save(store, 1), run_id=run.info.run_id)
    assert tsck.mlflow.find_snapshot(run.info.run_id).address == snapshot.root
    assert mlflow.get_run(run.info.run_id).info.status == "FINISHED"


def test_a_logged_snapshot_is_kept_until_it_is_unpinned(tracking: Path, store: tsck.Store) -> None:
    """Also one whose save is in progress, for which it waits."""
    with mlflow.start_run() as run:
        for step in range(1, 6):
            store.put_snapshot_async(state(step), ref=REF, step=step)
        logged = tsck.mlflow.log_snapshot(store, REF)
    owner = f"mlflow:{run.info.run_id}"
    (pin,) = store.pins()
    assert (pin.owner, pin.expires_ns, pin.snapshot.root) == (owner, None, logged.root)
    assert run.info.run_name in pin.reason
    save(store, 6)
    store.forget(f"{REF}@5")
    store.gc(FREE_ALL)
    assert restored(store, logged.root) == 5
    store.unpin(logged.root, owner=owner)
    store.gc(FREE_ALL)
    with pytest.raises(tsck.NotFoundError):
        store.checkout(logged.root)


def test_a_pin_for_some_time_or_none(tracking: Path, store: tsck.Store, tmp_path: Path) -> None:
    save(store, 1)
    with mlflow.start_run():
        tsck.mlflow.log_snapshot(store, REF, pin=False)
        assert store.pins() == ()
        with tsck.open(store.url, read_only=True) as reading:
            tsck.mlflow.log_snapshot(reading, REF, pin=False)
            with pytest.raises(tsck.PermissionDeniedError):
                tsck.mlflow.log_snapshot(reading, REF)
        tsck.mlflow.log_snapshot(store, REF, pin="30d")
        tsck.mlflow.log_snapshot(store, REF, pin="40d")  # replaces the first
    (pin,) = store.pins()
    assert pin.expires_ns is not None
    assert round((pin.expires_ns - pin.time_ns) / 86400e9) == 40


def test_a_relative_path_is_logged_as_an_absolute_one(tracking: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tsck.open("ckpt", create=True) as store, mlflow.start_run():
        tsck.mlflow.log_snapshot(store, save(store, 1))
        assert tsck.mlflow.find_snapshot().store == str(tmp_path / "ckpt")


def test_no_run_is_active(tracking: Path, store: tsck.Store) -> None:
    save(store, 1)
    with pytest.raises(tsck.errors.InvalidOptionError, match="no run of MLflow is active"):
        tsck.mlflow.log_snapshot(store, REF)
    with pytest.raises(tsck.errors.InvalidOptionError, match="no run of MLflow is active"):
        tsck.mlflow.find_snapshot()
    assert mlflow.active_run() is None
    assert store.pins() == ()


def test_a_snapshot_that_is_not_there(tracking: Path, store: tsck.Store) -> None:
    save(store, 1)
    with mlflow.start_run() as run:
        for address in ("runs/other", f"{REF}@7", "ab" * 32):
            with pytest.raises(tsck.NotFoundError):
                tsck.mlflow.log_snapshot(store, address)
        with pytest.raises(tsck.errors.InvalidOptionError, match="expires"):
            tsck.mlflow.log_snapshot(store, REF, pin="for ever")
    assert logged_files(run.info.run_id) == {}
    with pytest.raises(tsck.NotFoundError, match="has logged no snapshot"):
        tsck.mlflow.find_snapshot(run.info.run_id)


def test_a_run_that_is_not_there(tracking: Path, store: tsck.Store) -> None:
    save(store, 1)
    for run_id in ("0" * 32, "no/run"):
        with pytest.raises(tsck.NotFoundError, match="there is no run"):
            tsck.mlflow.log_snapshot(store, REF, run_id=run_id)
        with pytest.raises(tsck.NotFoundError, match="there is no run"):
            tsck.mlflow.find_snapshot(run_id)
    with mlflow.start_run() as run:
        pass
    mlflow.delete_run(run.info.run_id)
    with pytest.raises(tsck.errors.InvalidOptionError, match="was deleted"):
        tsck.mlflow.log_snapshot(store, REF, run_id=run.info.run_id)
    assert store.pins() == ()


def test_a_deleted_run_still_says_what_it_logged(tracking: Path, store: tsck.Store) -> None:
    with mlflow.start_run() as run:
        snapshot = tsck.mlflow.log_snapshot(store, save(store, 1))
    mlflow.delete_run(run.info.run_id)
    assert tsck.mlflow.find_snapshot(run.info.run_id) == (store.url, snapshot.root)


def test_tags_that_somebody_changed(tracking: Path, store: tsck.Store) -> None:
    with mlflow.start_run() as run:
        tsck.mlflow.log_snapshot(store, save(store, 1))
        mlflow.set_tag("tsck.root", "HEAD")
        with pytest.raises(tsck.errors.InputError, match="does not name a snapshot"):
            tsck.mlflow.find_snapshot()
        mlflow.log_text(json.dumps(["no", "pointer"]), "snapshots/runs/gpt@1.json")
        with pytest.raises(tsck.errors.InputError, match="does not name a snapshot"):
            tsck.mlflow.find_snapshot(run.info.run_id, f"{REF}@1")
        mlflow.log_text(json.dumps({"store": store.url, "address": "HEAD"}), "snapshots/runs/gpt@1.json")
        with pytest.raises(tsck.errors.InputError, match="does not name a snapshot: 'HEAD'"):
            tsck.mlflow.find_snapshot(run.info.run_id, f"{REF}@1")


def test_versions_that_are_not_supported(tracking: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    with mlflow.start_run() as run:
        for version in ("2.22.4", "3.5.1", "4.0.0rc1"):
            monkeypatch.setattr(mlflow, "__version__", version)
            for call in (lambda: tsck.mlflow.log_snapshot(store, REF), lambda: tsck.mlflow.find_snapshot(run.info.run_id)):
                with pytest.raises(tsck.MissingExtraError, match=re.escape(f"mlflow {version} is not supported")):
                    call()
    assert store.pins() == ()


@pytest.mark.s3
def test_credentials_are_not_logged(tracking: Path, moto_server: S3Server, tmp_path: Path) -> None:
    url = f"{moto_server.url}/mlflow"
    with tsck.open(url, create=True, cache_dir=tmp_path, storage_options=moto_server.storage_options) as store, mlflow.start_run() as run:
        snapshot = tsck.mlflow.log_snapshot(store, save(store, 1))
        found = tsck.mlflow.find_snapshot(run.info.run_id)
        assert found == (url, snapshot.root)
        assert restored(store, found.address) == 1
    assert SECRET in str(moto_server.storage_options)
    assert SECRET not in str(logged_files(run.info.run_id)) + str(mlflow.get_run(run.info.run_id).to_dictionary())
    assert SECRET.encode() not in (tracking / "mlflow.db").read_bytes()


def test_a_tracking_server(database: Path, store: tsck.Store, tmp_path: Path) -> None:
    for package in ("pandas", "huey"):
        pytest.importorskip(package, reason="`mlflow server` needs the whole of mlflow; mlflow-skinny has only the client")
    (tmp_path / "served").mkdir()
    with mlflow_tracking(database / "mlflow.db", tmp_path / "served") as url:
        mlflow.set_tracking_uri(url)
        mlflow.create_experiment("served")
        mlflow.set_experiment("served")
        with mlflow.start_run() as run:
            roots = [tsck.mlflow.log_snapshot(store, save(store, step)).root for step in (1, 2)]
        assert tsck.mlflow.find_snapshot(run.info.run_id) == (store.url, roots[1])
        assert tsck.mlflow.find_snapshot(run.info.run_id, f"{REF}@1") == (store.url, roots[0])
        assert [path.name for path in (tmp_path / "served").rglob("*@1.json")] == ["gpt@1.json"]
        with pytest.raises(tsck.NotFoundError, match="there is no run"):
            tsck.mlflow.find_snapshot("0" * 32)
    mlflow.set_tracking_uri(None)

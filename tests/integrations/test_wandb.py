"""Snapshots in Weights & Biases, in offline runs whose files are read back."""

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.integrations.trackers import FREE_ALL, REF, restored, save, state
from tests.servers import SECRET, S3Server

wandb = pytest.importorskip("wandb", reason="needs wandb, the extra of that name")

pytestmark = pytest.mark.slow
BLOCK = 32768


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """wandb reads its environment once in a process."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("wandb")
        for name in ("CACHE", "CONFIG", "DATA", "ARTIFACT"):
            patch.setenv(f"WANDB_{name}_DIR", str(folder / name))
        for name, value in (("MODE", "offline"), ("SILENT", "true")):
            patch.setenv(f"WANDB_{name}", value)
        yield
        wandb.teardown()


@pytest.fixture
def offline(service: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, where the run files are."""
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path / "job")
    yield tmp_path / "job"
    wandb.finish()


def start(**options: Any) -> Any:
    return wandb.init(project="snapshots", dir=Path.cwd(), **options)


def records_in(folder: Path) -> list[bytes]:
    """The records of the run files in a folder."""
    wandb.teardown()  # `finish` returns before all is written
    found = []
    for path in sorted(folder.rglob("*.wandb")):
        data, position, message = path.read_bytes(), 7, b""
        while position + 7 <= len(data):  # a log in the form of LevelDB's: records are cut at blocks
            if (left := BLOCK - position % BLOCK) < 7:
                position += left
                continue
            _, length, kind = struct.unpack_from("<IHB", data, position)
            message += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):
                found.append(message)
                message = b""
    return found


def artifacts_in(folder: Path) -> list[Any]:
    """The artifacts of the run files in a folder, as ``wandb sync`` would upload them."""
    from wandb.proto.wandb_internal_pb2 import Record

    records = [Record.FromString(each) for each in records_in(folder)]
    return [record.artifact for record in records if record.HasField("artifact")]


def test_an_offline_run_has_the_reference_and_the_snapshot_is_restored_from_it(offline: Path, store: tsck.Store) -> None:
    save(store, 1)
    snapshot = save(store, 2)
    with start():
        artifact = tsck.wandb.log_snapshot(store, REF, aliases=["best"])
    found = tsck.wandb.find_snapshot(artifact)
    assert found == (store.url, snapshot.root)
    with tsck.open(found.store, read_only=True) as again:
        assert restored(again, found.address) == 2
    (written,) = artifacts_in(offline)
    assert (written.name, written.type, sorted(written.aliases)) == ("runs-gpt", "model", ["best", "latest", "step-2"])
    assert [(each.path, each.ref, each.size) for each in written.manifest.contents] == [
        ("snapshot", f"tsck://{snapshot.root}::{store.url}", 0)
    ]
    assert artifact.metadata == {"store": store.url, "root": snapshot.root, "ref": REF, "step": 2, "metrics": {"loss": 1 / 3}}


def test_the_reference_is_opened_by_fsspec(offline: Path, store: tsck.Store) -> None:
    import fsspec

    with start():
        artifact = tsck.wandb.log_snapshot(store, save(store, 1))
    (entry,) = artifact.manifest.entries.values()
    files, path = fsspec.url_to_fs(entry.ref)
    assert files.info(path)["root"] == artifact.metadata["root"]
    assert f"{path}/model.safetensors" in files.ls(path, detail=False)


def test_names_and_types(offline: Path, store: tsck.Store) -> None:
    snapshot = save(store, None)
    with start() as run:
        tsck.wandb.log_snapshot(store, snapshot, run=run, name="base-model", artifact_type="snapshot")
        for wrong in ({"name": "runs/gpt"}, {"name": "x" * 200}, {"artifact_type": "job"}):
            with pytest.raises(tsck.InvalidNameError, match="W&B does not accept the artifact"):
                tsck.wandb.log_snapshot(store, snapshot, **wrong)
    (written,) = artifacts_in(offline)
    assert (written.name, written.type, list(written.aliases)) == ("base-model", "snapshot", ["latest"])


def test_a_logged_snapshot_is_kept_until_it_is_unpinned(offline: Path, store: tsck.Store) -> None:
    """Also one whose save is in progress, for which it waits."""
    with start() as run:
        owner = f"wandb:{run.path}"
        for step in range(1, 6):
            store.put_snapshot_async(state(step), ref=REF, step=step)
        found = tsck.wandb.find_snapshot(tsck.wandb.log_snapshot(store, REF))
    (pin,) = store.pins()
    assert (pin.owner, pin.expires_ns, pin.snapshot.root) == (owner, None, found.address)
    save(store, 6)
    store.forget(f"{REF}@5")
    store.gc(FREE_ALL)
    assert restored(store, found.address) == 5
    store.unpin(found.address, owner=owner)
    store.gc(FREE_ALL)
    with pytest.raises(tsck.NotFoundError):
        store.checkout(found.address)


def test_a_pin_for_some_time_or_none(offline: Path, store: tsck.Store) -> None:
    save(store, 1)
    with start():
        tsck.wandb.log_snapshot(store, REF, pin=False)
        assert store.pins() == ()
        with tsck.open(store.url, read_only=True) as reading:
            tsck.wandb.log_snapshot(reading, REF, pin=False)
            with pytest.raises(tsck.PermissionDeniedError):
                tsck.wandb.log_snapshot(reading, REF)
        tsck.wandb.log_snapshot(store, REF, pin="30d")
    (pin,) = store.pins()
    assert pin.expires_ns is not None


def test_a_disabled_run_pins_nothing(offline: Path, store: tsck.Store) -> None:
    with start(mode="disabled"):
        tsck.wandb.log_snapshot(store, save(store, 1))
    assert store.pins() == ()


def test_no_run_is_active(offline: Path, store: tsck.Store) -> None:
    save(store, 1)
    with pytest.raises(tsck.errors.InvalidOptionError, match="no run of W&B is active"):
        tsck.wandb.log_snapshot(store, REF)
    assert store.pins() == ()
    with start() as run:
        pass
    with pytest.raises(tsck.errors.InvalidOptionError, match="is finished"):
        tsck.wandb.log_snapshot(store, REF, run=run)


def test_a_snapshot_that_is_not_there(offline: Path, store: tsck.Store) -> None:
    save(store, 1)
    with start():
        for address in ("runs/other", f"{REF}@7", "ab" * 32):
            with pytest.raises(tsck.NotFoundError):
                tsck.wandb.log_snapshot(store, address)
    assert artifacts_in(offline) == []


def test_artifacts_that_refer_to_no_snapshot(offline: Path, tmp_path: Path) -> None:
    artifact = wandb.Artifact("other", type="model")
    with pytest.raises(tsck.NotFoundError, match="'other' refers to no snapshot"):
        tsck.wandb.find_snapshot(artifact)
    with artifact.new_file("snapshot") as file:
        file.write("{}")
    with pytest.raises(tsck.NotFoundError, match="'other' refers to no snapshot"):
        tsck.wandb.find_snapshot(artifact)
    for wrong in (f"s3://{'ab' * 32}::/ckpt", "tsck://runs/gpt::/ckpt", "tsck://abcd::/ckpt", f"tsck://{'ab' * 32}::"):
        artifact = wandb.Artifact("wrong", type="model")
        artifact.add_reference(wrong, name="snapshot", checksum=False)
        with pytest.raises(tsck.errors.InputError, match="the artifact 'wrong' does not name a snapshot"):
            tsck.wandb.find_snapshot(artifact)


def test_versions_that_are_not_supported(offline: Path, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    save(store, 1)
    with start():
        artifact = tsck.wandb.log_snapshot(store, REF, pin=False)
        for version in ("0.22.3", "1.0.0"):
            monkeypatch.setattr(wandb, "__version__", version)
            for call in (lambda: tsck.wandb.log_snapshot(store, REF), lambda: tsck.wandb.find_snapshot(artifact)):
                with pytest.raises(tsck.MissingExtraError, match=re.escape(f"wandb {version} is not supported")):
                    call()
    assert store.pins() == ()


@pytest.mark.s3
def test_credentials_are_not_logged(offline: Path, moto_server: S3Server, tmp_path: Path) -> None:
    url = f"{moto_server.url}/wandb"
    with tsck.open(url, create=True, cache_dir=tmp_path / "cache", storage_options=moto_server.storage_options) as store, start():
        snapshot = save(store, 1)
        artifact = tsck.wandb.log_snapshot(store, snapshot)
        assert tsck.wandb.find_snapshot(artifact) == (url, snapshot.root)
        assert restored(store, snapshot.root) == 1
    records = b"".join(records_in(offline))
    assert url.encode() in records
    assert SECRET.encode() not in records
    assert not any(SECRET.encode() in path.read_bytes() for path in offline.rglob("*") if path.is_file())

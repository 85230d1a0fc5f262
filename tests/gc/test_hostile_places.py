"""A writer who names locations in the log: readers send nothing there, and read what is in the store itself."""

import importlib
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.backend import open_backend
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import parse_ulid
from tensorstore_ck.errors import PlaceUnavailableError
from tensorstore_ck.log import Op
from tensorstore_ck.maintenance.salvage import salvage
from tensorstore_ck.redaction import display_url
from tests.gc.stores import AT_ONCE, contents, same, state

HOST = "127.0.0.1:{port}"
PLACES = [
    "s3://cold/x",
    "s3a://cold/x?storage_class=STANDARD_IA",
    "s3://id:secret@cold/x",
    f"s3://cold/x?endpoint_url=http://{HOST}",
    f"s3://{HOST}/x",
    f"http://{HOST}/x",
    f"https://{HOST}/x",
    "http://169.254.169.254/latest/meta-data",
    f"ftp://{HOST}/x",
    f"sftp://{HOST}/x",
    f"webhdfs://{HOST}/x",
    f"dask://{HOST}/x",
    "gs://cold/x",
    "az://cold@evil.blob.core.windows.net/x",
    "github://evil:repo@main/x",
    "memory://cold/x",
    f"simplecache::http://{HOST}/x",
    f"filecache::http://{HOST}/x",
    "blockcache::s3://cold/x",
    f"zip://x::http://{HOST}/x",
    "zip://x::file:///etc",
    f"reference://x::http://{HOST}/x",
    "file:///etc",
    "local:///etc",
    f"file://{HOST}/etc",
    "/etc",
    "{store}/../../outside",
    "file://{store}/%2e%2e/%2e%2e/outside",
    "{parent}/link",
    "{parent}-evil",
    "outside",
    "~/outside",
    "memory:/x",
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the store is: not the folder that the user is in."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "link").symlink_to(tmp_path / "outside")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / "jobs" / "ckpt"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a server that must not hear anything, to which credentials of the environment would go."""
    registry = importlib.import_module("fsspec.registry")  # fsspec has a dict of that name
    monkeypatch.setattr(registry, "get_filesystem_class", lambda protocol: pytest.fail(f"{protocol}:// was opened"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        found = server.getsockname()[1]
        for name, value in {"ENDPOINT_URL": f"http://127.0.0.1:{found}", "ACCESS_KEY_ID": "id", "SECRET_ACCESS_KEY": "secret"}.items():
            monkeypatch.setenv(f"AWS_{name}", value)
        yield found
        with pytest.raises(BlockingIOError):
            server.accept()


def plant(folder: Path, *places: str) -> None:
    """What a hostile writer does: claims that the packs of each ``run<n>``, which are in the store, are at a location.

    Those locations that need no network have the packs, and the mark.
    """
    with tsck.open(folder, create=True, no_sync=True, cache_dir=folder.parent / "cache") as store:
        seen: set[Path] = set()
        ops = []
        for number, place in enumerate(places):
            store.put_snapshot(state(number), ref=f"run{number}", step=number)
            paths = {path for path in (folder / "packs").rglob("*") if path.is_file()}
            packs = [pack for path in paths - seen if (pack := parse_ulid(path.name)) is not None]
            assert packs
            ops.append(Op.set_location(packs, place))
            seen = paths
        store.engine.log.append(lambda _: ops)
        for there in ("outside", "jobs-evil"):
            at = folder.parent.parent / there
            at.mkdir(exist_ok=True)
            (at / "place.json").write_text(f'{{"store": "{store.engine.config.uuid}", "url": "{folder}"}}')
            shutil.copytree(folder / "packs", at / "packs", dirs_exist_ok=True)


def open_anew(folder: Path, **options: Any) -> tsck.Store:
    store: tsck.Store = tsck.open(folder, cache_dir=folder.parent / f"cache-{len(list(folder.parent.iterdir()))}", **options)
    return store


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The folders that were opened."""
    found: set[Path] = set()
    init = LocalBackend.__init__

    def told(self: LocalBackend, root: str, **more: Any) -> None:
        found.add(Path(root))
        init(self, root, **more)

    monkeypatch.setattr(LocalBackend, "__init__", told)
    return found


def test_restores_use_none_of_the_locations_that_a_writer_names(folder: Path, port: int, roots: set[Path]) -> None:
    places = [place.format(port=port, store=folder, parent=folder.parent) for place in PLACES]
    plant(folder, *places)
    with open_anew(folder) as store:
        for number, place in enumerate(places):
            assert same(store.checkout(f"run{number}"), state(number)), f"the store's own copy was not read, but {place}"
    shutil.rmtree(folder / "packs")
    with open_anew(folder, read_only=True) as looking:
        for number, place in enumerate(places):
            assert [each.step for each in looking.log(f"run{number}")] == [number]
            with pytest.raises(PlaceUnavailableError, match="--allow-place") as refused:
                looking.checkout(f"run{number}")
            assert refused.value.exit_code == 17
            assert refused.value.object_id == display_url(place)
            assert display_url(place).partition("?")[0] in str(refused.value)
    assert roots == {folder}


@pytest.mark.parametrize("place", ["s3://cold/x", "/etc", "{parent}/link"])
def test_all_calls_refuse_it_and_change_nothing(folder: Path, port: int, roots: set[Path], place: str) -> None:
    plant(folder, place.format(parent=folder.parent))
    with open_anew(folder) as store, tsck.open(folder.parent / "copy", create=True, cache_dir=folder.parent / "cache") as other:
        assert store.show("run0").tensors
        store.branch("more", at="run0")
        store.put_snapshot(state(7), ref="more", step=7)
        store.set_policy("run*", recode_after="1s")
        before = contents(open_backend(folder))
        looks: list[Callable[[], object]] = [
            lambda: store.gc(AT_ONCE),
            lambda: store.fsck(read_data=True),
            store.repair,
            store.usage,
            store.migrate_tiers,
            lambda: store.migrate_tiers(claim_locations=True),
            lambda: salvage(open_backend(folder)),
        ]
        for look in looks:
            with pytest.raises(PlaceUnavailableError, match="does not allow"):
                look()
        assert contents(open_backend(folder)) == before
        tsck.copy(store, other)
        assert same(other.checkout("run0"), state(0))
    assert roots == {folder, folder.parent / "copy"}


@pytest.mark.parametrize("allowed", ["{outside}", "file://{outside}", "{jobs}/link"])
def test_a_location_that_the_host_allows(folder: Path, allowed: str) -> None:
    outside = folder.parent.parent / "outside"
    plant(folder, f"{folder.parent}/link" if "link" in allowed else str(outside))
    shutil.rmtree(folder / "packs")
    with open_anew(folder, places=[allowed.format(outside=outside, jobs=folder.parent)]) as store:
        assert same(store.checkout("run0"), state(0))
    with open_anew(folder, places=[f"{outside}-evil", f"{outside}/x"]) as store, pytest.raises(PlaceUnavailableError):
        store.checkout("run0")


def test_a_policy_that_a_writer_sets_moves_nothing_elsewhere(folder: Path, port: int) -> None:
    outside = folder.parent.parent / "outside"
    with tsck.open(folder, create=True, cache_dir=folder.parent / "cache", places=[outside, "s3://cold"]) as store:
        store.put_snapshot(state(1), ref="run")
        with pytest.raises(PlaceUnavailableError, match="--allow-place /etc"):
            store.set_policy("run", move_after=("1s", "/etc"))
        store.set_policy("run", move_after=("1s", str(outside)))
    for place in (str(outside), f"http://127.0.0.1:{port}/x", "s3://cold/x"):
        with open_anew(folder) as store:
            store.engine.log.append(lambda _, place=place: [Op.policy("run", {"move_after": [[1.0, place]]})])  # type: ignore[misc]
            clock = store.engine.clock
            store.engine.clock = lambda clock=clock: clock() + 10**12  # type: ignore[misc]
            assert store.migrate_tiers(dry_run=True).packs
            with pytest.raises(PlaceUnavailableError, match="does not allow"):
                store.migrate_tiers()
            assert same(store.checkout("run"), state(1))
    assert not list(outside.iterdir())

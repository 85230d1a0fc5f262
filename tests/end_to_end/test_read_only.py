"""A store that is opened read-only never changes: by no method, no command, and nothing that happens at the same time."""

import inspect
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner, Result

import tensorstore_ck as tsck
from tensorstore_ck.backend.cold.locations import LocationOpener
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.protocol import Backend
from tensorstore_ck.backend.read_only import ReadOnlyBackend
from tensorstore_ck.cli import main
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.engine import opening
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.integrations.dcp import Reader, Writer
from tensorstore_ck.integrations.filesystem import SnapshotFileSystem
from tensorstore_ck.log import Op
from tensorstore_ck.log.follow import Tail
from tensorstore_ck.maintenance.copy_store import copy_refs
from tests.end_to_end.test_fencing import run_in_child

NOBODY = 65534
WRITES = ("put", "replace", "create", "sync_folders", "open_writer", "open_whole_writer", "delete", "abort_upload")
READS = ("get", "get_if_there", "read_into", "size", "list", "folders", "space", "list_uploads", "close")
CHANGES_NOTHING = {"pending", "drain", "on_preemption", "on_event"}
"""Of saves in progress, which such a store does not have."""
LOOKS = [
    ("log",),
    ("log", "runs/gpt", "--json"),
    ("log", "runs/gpt", "--plot", "loss"),
    ("show", "runs/gpt@1"),
    ("diff", "runs/gpt~1", "runs/gpt"),
    ("usage", "--snapshots"),
    ("usage", "--codecs"),
    ("advise", "runs/gpt", "--stall", "2s"),
    ("branch",),
    ("tag",),
    ("pin",),
    ("forget",),
    ("policy", "apply", "--dry-run"),
    ("policy", "show"),
    ("quota",),
    ("policy", "test", "runs/gpt", "keep_last=1"),
    ("gc", "--dry-run"),
    ("recode", "--all", "--dry-run"),
    ("tier", "--dry-run"),
    ("staging",),
    ("fsck", "--no-record"),
    ("fsck", "--read-data", "--no-record"),
    ("watch", "runs/gpt", "--since-step", "1", "--count", "2"),
    ("get", "runs/gpt", "out.pt"),
    ("export", "runs/gpt", "--to", "safetensors", "out"),
    ("export", "runs/gpt", "--to", "dcp", "dcp"),
    ("catalog", "sync", "--db", "catalog.sqlite"),
    ("catalog", "rebuild", "--db", "catalog.sqlite"),
]


def state(number: int) -> dict[str, Any]:
    return {"model": {"weights": torch.full((5000,), number), "bias": torch.arange(number + 3)}, "step": number}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store with some history, a tag, a pin, a policy, and something that was forgotten."""
    with tsck.open(tmp_path / "ck", create=True, no_sync=True, cache_dir=tmp_path / "writers-cache") as store:
        for step in (1, 2, 3):
            store.put_snapshot(state(step), ref="runs/gpt", step=step, metrics={"loss": 1 / step})
        store.put_snapshot(state(4), ref="old", step=4)
        store.tag("paper", "runs/gpt@2")
        store.pin("runs/gpt@1", reason="a test")
        store.forget("old")
        store.set_policy("runs/*", keep_last=2, recode_after="1d")
    return tmp_path / "ck"


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was tried to be written: no local store can be, and who reads the log finds that a checkpoint is due."""
    found: list[str] = []

    def failing(name: str) -> Callable[..., Any]:
        def fail(self: Any, *names: object, **_: object) -> Any:
            found.append(f"{name} {names[0] if names else ''}")
            raise AssertionError(f"{name} was called")

        return fail

    for name in WRITES:
        monkeypatch.setattr(LocalBackend, name, failing(name))
        monkeypatch.setattr(ReadOnlyBackend, name, failing(name))
    monkeypatch.setattr(Tail, "is_due", lambda self: True)
    return found


def contents(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Every file and folder, with when it was changed last."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        info = path.stat()
        found[str(path)] = (info.st_size if path.is_file() else 0, info.st_mtime_ns, info.st_ctime_ns)
    return found


def run(place: Path, *arguments: str) -> Result:
    env = {"TSCK_STORE": str(place), "TSCK_CACHE_DIR": str(place.parent / "cache")}
    return CliRunner().invoke(main, arguments, env=env, catch_exceptions=False)


@pytest.fixture
def looked(place: Path) -> Iterator[tsck.Store]:
    """The store, opened to look; for a type checker as what it is at run time."""
    with tsck.open(place, read_only=True, cache_dir=place.parent / "cache") as store:
        assert isinstance(store, tsck.Store)
        yield store


def test_commands_that_look_change_nothing(place: Path, attempts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place.parent)
    before, make, opened = contents(place), opening.make_engine, list[bool]()

    def make_engine(*args: Any, **options: Any) -> Engine:
        opened.append(options["read_only"])
        return make(*args, **options)

    monkeypatch.setattr(opening, "make_engine", make_engine)
    for arguments in LOOKS:
        opened.clear()
        result = run(place, *arguments)
        assert result.exit_code == 0, result.output
        assert opened == [True], arguments
        assert attempts == [], arguments
        assert contents(place) == before, arguments


def test_a_copy_reads_its_source_alone(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tail, "is_due", lambda self: True)
    before = contents(place)
    with tsck.open(tmp_path / "copy", create=True, cache_dir=tmp_path / "cache") as target:
        tsck.copy(place, target)
        assert run(place, "copy", str(place), str(tmp_path / "copy")).exit_code == 0
        assert target.resolve("runs/gpt").step == 3
    assert contents(place) == before


def test_the_store_that_is_looked_at_reads_all_and_changes_nothing(place: Path, attempts: list[str]) -> None:
    before = contents(place)
    with tsck.open(place, read_only=True, cache_dir=place.parent / "cache") as store:
        for step in (1, 2, 3):
            assert torch.equal(store.checkout(f"runs/gpt@{step}")["model"]["weights"], state(step)["model"]["weights"])
        assert [snapshot.step for snapshot in store.log("runs/gpt")] == [3, 2, 1]
        with store.open_snapshot("paper") as lazy:
            assert lazy["model.weights"][0] == 2
        assert store.usage().snapshots == 4
        assert store.fsck(read_data=True).ok
        assert len(store.forgotten()) == 1
        assert store.apply_policies(dry_run=True).dry_run
        assert store.gc(dry_run=True).dry_run
        assert next(store.watch("runs/gpt", since_step=2, pin_for=None)).step == 2
    files = SnapshotFileSystem(str(place), cache_dir=str(place.parent / "cache"))
    assert len(files.cat_file("runs/gpt/model.safetensors")) > 5000 * 4
    assert attempts == []
    assert contents(place) == before


def test_without_it_a_checkpoint_of_the_log_is_written(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tail, "is_due", lambda self: True)
    before = contents(place)
    with tsck.open(place, cache_dir=place.parent / "cache") as store:
        store.log()
    assert contents(place) != before, "else the tests above would show nothing"


def test_every_method_is_one_of_looking_or_is_refused(looked: tsck.Store) -> None:
    looking = {name for name in dir(tsck.ReadOnlyStore) if not name.startswith("_")} | {"bisect", "watch"}
    earlier_names = {"streams", "kept_by", "retain", "tier"}
    public = {name for name in dir(tsck.Store) if not name.startswith("_")} - earlier_names
    assert looking <= public
    for name in sorted(public - looking - CHANGES_NOTHING):
        with pytest.raises(tsck.PermissionDeniedError, match=re.escape(f"{name}() is refused: the store at {looked.url}")):
            getattr(looked, name)()
    for name in ("gc", "recode", "migrate_tiers", "apply_policies"):
        with pytest.raises(tsck.PermissionDeniedError, match=rf"{name}\(\) is refused.*read_only=True"):
            getattr(looked, name)()
    with pytest.raises(tsck.PermissionDeniedError, match="pin_for=None"):
        next(looked.watch("runs/gpt", since_step=1))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_built_on_a_store_is_refused_too(looked: tsck.Store, place: Path, tmp_path: Path) -> None:
    before = contents(place)
    torch.save(state(5), tmp_path / "five.pt")
    root, training = looked.resolve("runs/gpt").root, tsck.TrainingState(model=torch.nn.Linear(2, 2))
    with tsck.open(tmp_path / "other", create=True, cache_dir=tmp_path / "other-cache") as other:
        other.put_snapshot(state(6), ref="six")
        changes: list[Callable[[], object]] = [
            lambda: tsck.import_checkpoint(looked, tmp_path / "five.pt", ref="five"),
            lambda: training.put(looked, ref="trained"),
            lambda: training.put_async(looked, ref="trained"),
            lambda: tsck.copy(other, looked),
            lambda: copy_refs(other.engine, looked.engine),
            lambda: Writer(looked, "seven").set_up_storage_writer(True),
            lambda: looked.engine.backend.delete(["store.json"]),
            lambda: looked.engine.log.append(lambda view: [Op.tag("new", Digest(bytes.fromhex(root)))]),
        ]
        for change in changes:
            with pytest.raises(tsck.PermissionDeniedError, match="read_only=True"):
                change()
    assert contents(place) == before
    into = {"step": 0, "model": {"weights": torch.zeros(5000), "bias": torch.arange(6)}}
    dcp.load(into, storage_reader=Reader(looked, "runs/gpt"), no_dist=True)
    assert into["step"] == looked.checkout("runs/gpt")["step"] == 3, "it can still be read"


def test_the_backend_refuses_whatever_writes() -> None:
    methods = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    assert methods == {*WRITES, *READS}, "a new method of backends: does it write?"
    backend = LocationOpener("memory://store", read_only=True)("memory://somewhere")
    for name in WRITES:
        with pytest.raises(tsck.PermissionDeniedError, match="read_only=True"):
            getattr(backend, name)("packs/one", b"")
    assert list(backend.list("")) == []


def test_it_makes_no_store_and_takes_no_staging_disk(tmp_path: Path, place: Path) -> None:
    with pytest.raises(tsck.InvalidOptionError, match="create="):
        tsck.open(tmp_path / "new", create=True, read_only=True)  # type: ignore[call-overload]
    with pytest.raises(tsck.InvalidOptionError, match="staging="):
        tsck.open(place, staging=tmp_path / "staging", read_only=True)  # type: ignore[call-overload]
    with pytest.raises(tsck.NotAStoreError):
        tsck.open(tmp_path / "new", read_only=True)
    assert not (tmp_path / "new").exists()


def as_a_type_checker_sees_it(url: str) -> None:
    """Never run: mypy finds an ignore that is not needed, and a mistake that is not ignored."""
    looked = tsck.open(url, read_only=True)
    looked.checkout("runs/gpt")
    looked.gc(dry_run=True)
    looked.put_snapshot({}, ref="runs/gpt")  # type: ignore[attr-defined]
    looked.put_snapshot_async({}, ref="runs/gpt")  # type: ignore[attr-defined]
    looked.branch("new", at="runs/gpt")  # type: ignore[attr-defined]
    looked.forget("runs/gpt")  # type: ignore[attr-defined]
    looked.gc()  # type: ignore[call-arg]
    looked.watch("runs/gpt")  # type: ignore[call-arg]
    tsck.import_checkpoint(looked, "model.pt", ref="runs/gpt")  # type: ignore[arg-type]
    tsck.TrainingState().put(looked, ref="runs/gpt")  # type: ignore[arg-type]
    tsck.TrainingState().restore(looked, "runs/gpt")
    tsck.export_snapshot(looked, "runs/gpt", "model.safetensors", format="safetensors")
    tsck.open(url).put_snapshot({}, ref="runs/gpt")
    Reader(looked, "runs/gpt")
    Writer(looked, "runs/gpt")  # type: ignore[arg-type]
    any_store: tsck.ReadOnlyStore = tsck.open(url)
    any_store.log()


def work_without_rights(place: Path, cache: Path) -> str:
    """Looks at a store whose files this user can only read."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    with pytest.raises(PermissionError):
        (place / "new").write_bytes(b"")
    with tsck.open(place, read_only=True, cache_dir=cache) as store:
        assert store.checkout("runs/gpt")["step"] == 3
        assert store.gc(dry_run=True).dry_run
        assert store.fsck(read_data=True).ok
        with pytest.raises(tsck.PermissionDeniedError, match="read_only=True"):
            store.tag("new", "runs/gpt")  # type: ignore[attr-defined]
    for arguments in (("log",), ("get", "runs/gpt", str(cache / "out.pt")), ("watch", "runs/gpt", "--since-step", "1", "--count", "1")):
        env = {"TSCK_STORE": str(place), "TSCK_CACHE_DIR": str(cache)}
        result = CliRunner().invoke(main, arguments, env=env, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    with fsspec.filesystem("tsck", store=str(place), cache_dir=str(cache)).open("runs/gpt/model.safetensors") as file:
        assert len(file.read()) > 5000 * 4
    return "done"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_no_right_to_write_is_needed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("tsck", SnapshotFileSystem, clobber=True)
    monkeypatch.setattr(Tail, "is_due", lambda self: True)
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads
    folder = Path(tempfile.mkdtemp())  # that another user can reach, other than pytest's own
    try:
        shutil.copytree(place, folder / "ck")
        (folder / "cache").mkdir(mode=0o700)
        for path in (folder / "ck", *(folder / "ck").rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        folder.chmod(0o755)
        if os.geteuid() == 0:
            os.chown(folder / "cache", NOBODY, NOBODY)
        before = contents(folder / "ck")
        assert run_in_child(lambda: work_without_rights(folder / "ck", folder / "cache")) == "done"
        assert contents(folder / "ck") == before
    finally:
        for path in (folder / "ck").rglob("*"):
            if path.is_dir():
                path.chmod(0o755)
        shutil.rmtree(folder, ignore_errors=True)

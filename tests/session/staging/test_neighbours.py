"""Another user of this host, where all may write above the staging folder: what is theirs is refused, what is ours they never see."""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import PermissionDeniedError
from tests.effort import PATIENCE_SECONDS
from tests.session.staging import neighbours
from tests.session.staging.neighbours import FILES, FOLDERS, ON_FILES, ON_FOLDERS, OTHER, Attack, Users


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "ck"
    tsck.open(path, create=True, cache_dir=path.parent / "cache").close()
    return path


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> Users:
    return Users(monkeypatch)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    path = tmp_path / "shared"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """What the victim has elsewhere; nothing may happen to it."""
    path = tmp_path / "home"
    (path / "packs").mkdir(parents=True)
    (path / "notes").write_text("precious")
    yield path
    assert {str(each.relative_to(path)) for each in path.rglob("*")} == {"packs", "notes"}
    assert (path / "notes").read_text() == "precious"


def opened(url: Path, staging: Any) -> tsck.Store:
    return tsck.open(url, cache_dir=url.parent / "cache", staging=staging)


def root_of(url: Path, shared: Path) -> Path:
    with tsck.open(url, cache_dir=url.parent / "cache") as store:
        return shared / store.engine.config.uuid


def state_of(step: int) -> dict[str, Any]:
    return {"weights": torch.arange(1000) + step, "step": step}


def stage(url: Path, shared: Path, ref: str) -> None:
    """A job that ended when step 1 was staged."""
    with opened(url, tsck.Staging(shared, stagger_seconds=3600)) as store:
        store.put_snapshot_async(state_of(1), ref=ref, step=1).staged.wait(PATIENCE_SECONDS)
        assert len(store.drain(0).staged) == 1


def modes(folder: Path) -> set[tuple[bool, int]]:
    found = [os.lstat(each) for each in (folder, *folder.rglob("*"))]
    return {(stat.S_ISDIR(each.st_mode), stat.S_IMODE(each.st_mode)) for each in found}


PRIVATE = {(True, 0o700), (False, 0o600)}
ATTACKS = list(ON_FILES.values())
CASES = [
    *((FOLDERS[at], list(ON_FOLDERS.values())[number % len(ON_FOLDERS)]) for number, at in enumerate(FOLDERS)),
    *((FILES[at], ATTACKS[number % len(ATTACKS)]) for number, at in enumerate(FILES)),
]
"""Each folder and file once, and each attack on both."""


@pytest.mark.parametrize("case", CASES, ids=[f"{name}: {attack.__name__}" for name, attack in CASES])
def test_files_of_another_user_are_refused(url: Path, shared: Path, precious: Path, users: Users, case: tuple[str, Attack]) -> None:
    (name, attack), root = case, root_of(url, shared)
    neighbours.make_tree(root)
    attack(root / name, precious, users)
    with pytest.raises(PermissionDeniedError, match="another user of this host may have put it there") as refused:
        opened(url, shared)
    assert str(root / name).rstrip("/") in str(refused.value)
    assert "remove it, or name another folder" in str(refused.value)
    if attack is neighbours.other_owner:
        assert f"by user {OTHER}" in str(refused.value)


def open_all(root: Path) -> None:
    """As a umask of 0 leaves them."""
    for each in (root, *root.rglob("*")):
        each.chmod(0o777 if each.is_dir() else 0o666)


def publish(url: Path, shared: Path, ref: str) -> None:
    """The next job, which publishes what was staged."""
    with opened(url, shared) as store:
        assert store.checkout(ref)["step"] == 1
        for pending in store.pending():
            pending.wait(PATIENCE_SECONDS)
        assert [each.step for each in store.log(ref)] == [1]


def test_what_is_ours_and_too_open_is_closed_and_published(url: Path, shared: Path) -> None:
    root = root_of(url, shared)
    neighbours.make_tree(root)
    open_all(root)
    opened(url, shared).close()
    assert modes(root) == PRIVATE
    shutil.rmtree(root)
    stage(url, shared, "open")
    open_all(root)
    publish(url, shared, "open")
    assert modes(root) == PRIVATE


def test_all_that_is_made_is_private(url: Path, tmp_path: Path) -> None:
    """Whatever the umask: the manifest, journals and copies, too."""
    scratch = tmp_path / "scratch" / "stage"
    before = os.umask(0)
    try:
        stage(url, scratch, "private")
        publish(url, scratch, "private")
        assert list(scratch.glob("*/copies/packs"))
        assert modes(scratch) == PRIVATE
    finally:
        os.umask(before)


def test_a_folder_that_is_exchanged_while_it_is_used(url: Path, shared: Path, precious: Path) -> None:
    """By the owner of the folder above, whom a sticky bit does not stop."""
    root = root_of(url, shared)
    with opened(url, tsck.Staging(shared, stagger_seconds=3600)) as store:
        root.rename(shared / "away")
        root.mkdir()
        for name in ("unsent", "staged", "uploads", "copies"):
            (root / name).symlink_to(precious)
        (root / "users").symlink_to(precious / "notes")
        store.put_snapshot_async(state_of(1), ref="exchanged", step=1).staged.wait(PATIENCE_SECONDS)
        assert len(store.drain(0).staged) == 1
    assert len(list((shared / "away" / "staged").iterdir())) == 1


def test_a_folder_above_where_everybody_exchanges_everything(url: Path, shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(PermissionDeniedError, match=r"shared can be written by every user .*`chmod \+t`"):
        opened(url, shared)
    assert list(shared.iterdir()) == []
    for mode in (0o1777, 0o775):
        shared.chmod(mode)
        opened(url, shared).close()


def test_a_folder_above_that_is_a_link(url: Path, shared: Path, precious: Path, users: Users) -> None:
    (shared / "stage").symlink_to(precious / "packs")
    users.give(shared / "stage")
    with pytest.raises(PermissionDeniedError, match=f"is a symbolic link that user {OTHER} made"):
        opened(url, shared / "stage")


@pytest.mark.skipif(os.geteuid() != 0, reason="asks as another user")
def test_another_user_reads_and_writes_nothing(url: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        shared = Path(scratch) / "shared"
        shared.mkdir()
        shared.chmod(0o1777)
        shared.parent.chmod(0o711)
        stage(url, shared, "read")
        (pack, *_) = shared.glob("*/unsent/packs/*/*")
        assert pack.stat().st_size > 0
        for command in (f"cat {pack}", f"ls {pack.parents[3]}", f"touch {pack.parents[3]}/x", f"mv {pack.parents[3]} {shared}/away"):
            done = subprocess.run(["sh", "-c", command], user=OTHER, group=OTHER, extra_groups=[], capture_output=True, check=False)
            assert done.returncode, command
            assert done.stdout == b""
            assert b"ermi" in done.stderr, done.stderr

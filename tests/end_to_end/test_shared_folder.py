"""Several users and one store in a folder: who may do what follows from its root folder alone, whatever their umask, and root's runs."""

import ctypes
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from click.testing import CliRunner

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.local_modes import share_with_group
from tensorstore_ck.cli import main
from tensorstore_ck.common.private_folder import PrivateFolder
from tensorstore_ck.errors import PermissionDeniedError
from tests.gc.interleavings.invariant import read_back
from tests.gc.interleavings.scenes import put_labels
from tests.gc.stores import AT_ONCE, open_store

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be several users")

GROUP: Final = 3000
NOBODY: Final = 65534
CLONE_NEWUSER: Final = 0x10000000


class User(NamedTuple):
    """A user, and the umask of its processes."""

    uid: int
    gid: int
    umask: int


ANN, BOB = User(4001, GROUP, 0o022), User(4002, GROUP, 0o077)
STRANGER, ROOT = User(4003, 4003, 0o022), User(0, 0, 0o077)


def save(path: Path) -> None:
    store = open_store(LocalBackend(str(path)))
    put_labels(store.engine, "job", f"shared {os.getuid()}")


def read(path: Path) -> None:
    engine = open_store(LocalBackend(str(path))).engine
    for info in engine.log.newest_view().snapshots():
        read_back(engine, info)


def free(path: Path) -> None:
    """Frees what another user saved."""
    store = open_store(LocalBackend(str(path)))
    store.forget("job~1")
    assert store.gc(AT_ONCE).freed_bytes > 0


ACTS: Final = {"save": save, "read": read, "free": free}


def may(user: User, act: Callable[[Path], object], path: Path) -> bool:
    """Whether this user's process can do it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            os.umask(user.umask)
            os.setgroups([])
            os.setgid(user.gid)
            os.setuid(user.uid)
            act(path)
            code = 0
        except PermissionDeniedError:
            code = errno.EACCES
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, errno.EACCES)
    return code == 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Below one that everybody may enter, which pytest's are not."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    folder = base / "store"
    folder.mkdir()
    yield folder
    shutil.rmtree(base)


def give(folder: Path, mode: int) -> None:
    """To Ann and her group."""
    os.chown(folder, ANN.uid, GROUP)
    folder.chmod(mode)


WHO_MAY: Final[dict[int, dict[User, str]]] = {
    0o2775: {ANN: "save read free", BOB: "save read free", STRANGER: "read", ROOT: "save read free"},
    0o770: {ANN: "save read free", BOB: "save read free", STRANGER: "", ROOT: "save read free"},
    0o755: {ANN: "save read free", BOB: "read", STRANGER: "read", ROOT: "save read free"},
    0o700: {ANN: "save read free", BOB: "", STRANGER: "", ROOT: "save read free"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", WHO_MAY, ids=oct)
def test_who_may_do_what(folder: Path, mode: int) -> None:
    """Each after every other who may save has saved: the umask of one, or root, locks nobody out, and lets nobody in."""
    give(folder, mode)
    savers = [user for user, acts in WHO_MAY[mode].items() if "save" in acts]
    for user in sorted(savers, key=lambda user: user is not ANN):
        assert may(user, save, folder)
    for user, acts in WHO_MAY[mode].items():
        assert all(may(saver, save, folder) for saver in savers[-2:])
        found = [name for name, act in ACTS.items() if may(user, act, folder)]
        assert " ".join(found) == acts, user
    assert {path.stat().st_uid for path in folder.rglob("*")} <= {ANN.uid, BOB.uid}, "what root made is Ann's"
    made = [path for path in folder.rglob("*") if not path.is_symlink()]
    assert {(stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) for path in made if path.is_dir()} == {(mode, GROUP)}
    assert {(stat.S_IMODE(path.stat().st_mode), path.stat().st_gid) for path in made if path.is_file()} == {(mode & 0o666, GROUP)}


def test_shared_with_a_group_from_the_beginning(folder: Path) -> None:
    os.chown(folder, ANN.uid, GROUP)
    folder.chmod(0o700)
    assert may(ANN, lambda path: CliRunner().invoke(main, ["init", str(path), "--shared", "group"], catch_exceptions=False), folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o2770
    assert all(may(user, save, folder) for user in (BOB, ROOT, ANN))
    made = [path.stat() for path in folder.rglob("*")]
    assert {(stat.filemode(found.st_mode), found.st_gid) for found in made} == {("drwxrws---", GROUP), ("-rw-rw----", GROUP)}


def move_packs(path: Path) -> None:
    """Moves all packs to a location that is made for it."""
    store = open_store(LocalBackend(str(path)))
    store.set_policy("*", move_after=((0.001, f"{path.parent}/new/cold"),))
    assert store.migrate_tiers().packs


@pytest.mark.parametrize("mover", [BOB, ROOT], ids=["user", "root"])
def test_packs_that_one_user_moved_are_for_all(folder: Path, mover: User) -> None:
    os.chown(folder.parent, ANN.uid, GROUP)
    folder.parent.chmod(0o770)
    give(folder, 0o2770)
    assert all(may(ANN, save, folder) for _ in range(2))
    assert may(mover, move_packs, folder)
    assert all(may(ANN, act, folder) for act in (read, free))
    made = [path.stat() for path in [folder.parent / "new", *folder.parent.glob("new/**/*")]]
    assert {(stat.filemode(found.st_mode), found.st_gid) for found in made} == {("drwxrws---", GROUP), ("-rw-rw----", GROUP)}
    assert {found.st_uid for found in made} == {ANN.uid if mover is ROOT else BOB.uid}


def test_a_folder_that_is_not_there_is_made(folder: Path) -> None:
    share_with_group(str(folder / "new"))
    assert stat.S_IMODE((folder / "new").stat().st_mode) & 0o2770 == 0o2770


def test_fsck_reports_and_repairs_modes(folder: Path) -> None:
    give(folder, 0o2775)
    store = open_store(LocalBackend(str(folder)))
    put_labels(store.engine, "job", "a b")
    assert not store.fsck().findings
    pack = next(path for path in folder.rglob("packs/*/*"))
    pack.chmod(0o600)
    pack.parent.chmod(0o755)
    os.chown(folder / "store.json", ANN.uid, STRANGER.gid)
    (finding,) = store.fsck().findings
    assert (finding.kind, finding.severity, finding.object) == ("mode", "notice", f"packs/{pack.parent.name}")
    assert finding.message.startswith("this and 2 more files and folders lack the mode")
    assert "drwxrwsr-x, group 3000" in finding.message
    report = store.repair()
    assert [(each.object, each.how) for each in report.mended] == [(finding.object, "3 modes and groups set to those of the root folder")]
    assert not report.after.findings
    assert stat.filemode(pack.stat().st_mode) == "-rw-rw-r--"


def squashed(act: Callable[[Path], object], path: Path) -> bool:
    """Whether root can do it where the server takes it for nobody, as NFS does with root_squash: root of a namespace, nobody outside."""
    ready, go = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            if ctypes.CDLL(None).unshare(CLONE_NEWUSER):
                os._exit(errno.ENOSYS)
            os.write(ready[1], b"1")
            os.read(go[0], 1)
            os.setgid(0)
            os.setuid(0)
            assert os.geteuid() == 0
            act(path)
            code = 0
        except PermissionDeniedError:
            code = errno.EACCES
        finally:
            os._exit(code)
    os.close(ready[1])
    if os.read(ready[0], 1):
        for ids in ("uid_map", "gid_map"):
            Path(f"/proc/{child}/{ids}").write_text(f"0 {NOBODY} 1")
        os.write(go[1], b"1")
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    for end in (ready[0], *go):
        os.close(end)
    if code == errno.ENOSYS:
        pytest.skip("no namespaces of users here")
    assert code in (0, errno.EACCES)
    return code == 0


def test_root_that_the_server_takes_for_nobody(folder: Path) -> None:
    """It may do what others may, leaves no half-made save, and locks nobody out."""
    give(folder, 0o2775)
    assert may(ANN, save, folder)
    before = {path for path in folder.rglob("*") if path.is_file()}
    assert not squashed(save, folder)
    assert squashed(read, folder)
    assert {path for path in folder.rglob("*") if path.is_file()} == before
    shutil.rmtree(folder)
    folder.mkdir()
    give(folder, 0o2777)
    assert all(may(user, save, folder) for user in (ANN, BOB))
    assert squashed(save, folder)
    assert all(may(user, act, folder) for user in (ANN, BOB) for act in (save, read))
    assert may(ANN, free, folder)


@pytest.mark.slow
def test_a_default_acl_decides_instead(folder: Path) -> None:
    """Bob, who is in no group of the folder, may do everything by the ACL; the modes, which are its mask, are left to the kernel."""
    give(folder, 0o700)
    entries = [(1, 7, -1), (2, 7, STRANGER.uid), (4, 0, -1), (16, 7, -1), (32, 0, -1)]  # owner, a user, group, mask, others
    acl = (2).to_bytes(4, "little") + b"".join(
        tag.to_bytes(2, "little") + bits.to_bytes(2, "little") + (who & 0xFFFFFFFF).to_bytes(4, "little") for tag, bits, who in entries
    )
    try:
        os.setxattr(folder, "system.posix_acl_default", acl)
        os.setxattr(folder, "system.posix_acl_access", acl)
    except OSError as exc:
        pytest.skip(f"this filesystem has no ACLs: {exc}")
    assert all(may(user, save, folder) for user in (ANN, STRANGER, ROOT, STRANGER))
    assert may(STRANGER, free, folder)
    assert not may(BOB, read, folder)


def test_staging_stays_private(folder: Path) -> None:
    folder.chmod(0o755)
    with closing(PrivateFolder(str(folder / "private"))) as private:
        private.make()
        backend = LocalBackend("unsent", within=private)
        backend.put("packs/1", b"x")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")} == {0o700, 0o600}

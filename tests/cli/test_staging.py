"""staging: what is durable on this host's disk is shown, resumed and dropped, as a user runs it."""

import atexit
import fcntl
import re
import shlex
import shutil
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck_package
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.staging import take_over
from tensorstore_ck.backend.staging.upload_journal import JournalEntry, UploadJournal
from tensorstore_ck.cli.options import StoreChoice
from tensorstore_ck.cli.output import short_root
from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.write.request import ANY
from tensorstore_ck.errors import BackendUnavailableError
from tensorstore_ck.format.record import decode_record, record_name
from tensorstore_ck.format.sealed import pack_body
from tensorstore_ck.session.staging.manifest import Manifest, decode_manifest
from tests.cli.conftest import Tsck
from tests.effort import PATIENCE_SECONDS
from tests.session.staging.neighbours import ON_FILES, OTHER, Users

DISK = ("--staging", "stage")


def state_of(step: int) -> dict[str, Any]:
    return {"frozen": torch.arange(50_000), "moving": torch.full((50_000,), step), "step": step}


@cache
def _staged() -> TemporaryDirectory[str]:
    """The store of a job that published step 0, and ended when steps 1 and 2 were staged. Made once: each test has a copy."""
    made = TemporaryDirectory(prefix="tsck-staged-")
    atexit.register(made.cleanup)
    folder = Path(made.name)
    staging = tsck_package.Staging(folder / "stage", stagger_seconds=3600)
    with tsck_package.open(folder / "ck", create=True, cache_dir=folder / "cache") as store:
        store.put_snapshot(state_of(0), ref="job", step=0)
    store = tsck_package.open(folder / "ck", cache_dir=folder / "cache", staging=staging)
    store.checkout("job")
    for step in (1, 2):
        store.put_snapshot_async(state_of(step), ref="job", step=step, codec="raw")
    for pending in store.pending():
        pending.staged.wait(PATIENCE_SECONDS)
    assert [pending.step for pending in store.drain(0).staged] == [1, 2]
    store.close()
    return made


@pytest.fixture
def staged(tsck: Tsck, tmp_path: Path) -> Tsck:
    """`tsck` on a store whose branch job has step 0; steps 1 and 2 are staged."""
    shutil.copytree(_staged().name, tmp_path, dirs_exist_ok=True)
    return tsck


def steps(tsck: Tsck) -> list[int]:
    return [snapshot["step"] for snapshot in tsck("log", "job", "--json").json]


def files(tmp_path: Path) -> list[str]:
    """What finished saves left on the disk, without copies."""
    found = [path for path in (tmp_path / "stage").rglob("*") if path.is_file()]
    return [path.name for path in found if "copies" not in path.parts and path.name != "users"]


def test_what_is_staged_is_shown(staged: Tsck) -> None:
    shown = staged("staging", *DISK)
    assert shown.code == 0
    title, first, second = shown.out.splitlines()
    assert title.split() == ["TXN", "REF", "STEP", "ROOT", "RANKS", "HERE", "SIZE", "SENT", "AGE", "LOG", "SAYS", "HOST", "FOLDER"]
    assert {put["host"] for put in staged("staging", "--json").json} == {socket.gethostname()}, "by the log alone"
    assert first.split()[-2:] == [socket.gethostname(), str(folder_of(Path.cwd()))]
    assert first.split()[1:3] == ["job", "1"]
    assert second.split()[1:3] == ["job", "2"]
    assert first.split()[4] == "1/1"
    assert first.split()[-3] == "staged"
    one, two = staged("staging", *DISK, "--json").json
    assert (one["step"], two["step"], one["sent_bytes"], one["problems"]) == (1, 2, 0, [])
    assert one["size_bytes"] > 50_000 * 8 / 100
    assert len(one["root"]) == 64
    assert steps(staged) == [0], "looking changes nothing"


def test_resume_publishes(staged: Tsck, tmp_path: Path) -> None:
    done = staged("staging", "resume", *DISK)
    assert done.code == 0, done
    assert done.out.count("published job at") == 2
    assert steps(staged) == [2, 1, 0]
    assert files(tmp_path) == []
    assert "nothing is staged" in staged("staging", "resume", *DISK).out
    assert "nothing is staged" in staged("staging", *DISK).out
    assert "no pins" in staged("pin").out
    assert staged("fsck", "--read-data").code == 0


def test_drop_gives_up_one(staged: Tsck, tmp_path: Path) -> None:
    one, two = staged("staging", *DISK, "--json").json
    refused = staged("staging", "drop", one["txn"], *DISK)
    assert (refused.code, "--yes" in refused.err) == (2, True)
    assert staged("staging", "drop", one["txn"], *DISK, "--yes").out == f"dropped job@1 ({one['txn']})\n"
    assert [put["txn"] for put in staged("staging", *DISK, "--json").json] == [two["txn"]]
    assert staged("staging", "resume", *DISK, "--json").json["failed"] == []
    assert steps(staged) == [2, 0], "what it shared with the dropped one was kept for it"
    assert files(tmp_path) == []
    assert "no pins" in staged("pin").out
    assert staged("fsck", "--read-data").code == 0


def test_drop_all(staged: Tsck, tmp_path: Path) -> None:
    assert staged("staging", "drop", "--all", "--yes", *DISK, "--json").json["published"] == []
    assert files(tmp_path) == []
    assert steps(staged) == [0]
    assert "no pins" in staged("pin").out
    assert "nothing is staged" in staged("staging").out
    assert "nothing is staged" in staged("staging", "drop", "--all", "--yes", *DISK).out


def test_what_the_log_knows_of_other_hosts(staged: Tsck, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "stage")
    one, _ = staged("staging", "--json").json
    assert one["here"] == []
    assert "the hosts that staged it" in one["problems"][0]
    (tmp_path / "stage").mkdir()
    assert "nothing is staged" in staged("staging", "drop", "--all", "--yes", *DISK).out, "another host may have it"
    left = staged("staging", "resume", *DISK)
    assert left.code == 0
    assert "cannot be published from here" in left.out
    assert staged("staging", "drop", one["txn"], "--yes").code == 0
    assert len(staged("staging", "--json").json) == 1
    assert "the store has no pins" not in staged("pin").out


def test_a_ref_that_moved_meanwhile(staged: Tsck, tmp_path: Path) -> None:
    with tsck_package.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(state_of(7), ref="job", step=7, expect=tsck_package.ANY)
    failed = staged("staging", "resume", *DISK)
    assert failed.code == 11, failed
    assert failed.out.count("moved it (") == 2
    assert steps(staged) == [7, 0]
    assert files(tmp_path) == []
    assert "no pins" in staged("pin").out


def test_damage_is_shown_and_dropped(staged: Tsck, tmp_path: Path) -> None:
    manifest, *_ = sorted((tmp_path / "stage").glob("*/staged/*"))
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"x")
    (pack, *_) = sorted((tmp_path / "stage").glob("*/unsent/packs/*/*"), key=lambda path: path.name, reverse=True)
    pack.unlink()
    first, second = staged("staging", *DISK, "--json").json
    assert "does not match its hash" in first["problems"][-1]
    assert second["problems"] == [f"neither on this disk nor in the store: packs/{pack.parent.name}/{pack.name}"]
    resumed = staged("staging", "resume", *DISK, "--json")
    assert resumed.code == 42
    assert resumed.json["failed"][0]["put"] == "job@2"
    assert steps(staged) == [0]
    assert staged("staging", "drop", "--all", "--yes", *DISK).code == 0
    assert files(tmp_path) == []
    assert "no pins" in staged("pin").out


def test_published_before_it_was_cleaned_up(staged: Tsck, tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "stage", tmp_path / "before")
    staged("staging", "resume", *DISK)
    before = ("--staging", "before")
    assert {put["state"] for put in staged("staging", *before, "--json").json} == {"published"}
    dropped = staged("staging", "drop", "--all", "--yes", *before)
    assert dropped.out.count("was published already") == 2
    assert steps(staged) == [2, 1, 0]


# --- what another user staged --------------------------------------------------------------------------------------------

ACCEPTED = (*DISK, "--accept-owner", str(OTHER))


@pytest.fixture
def theirs(staged: Tsck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Users:
    """What is staged is another user's, and this process is root."""
    users = Users(monkeypatch)
    users.give_all(folder_of(tmp_path))
    return users


def folder_of(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "stage").iterdir()
    return found


def newest(tmp_path: Path, pattern: str) -> Path:
    return max(folder_of(tmp_path).glob(pattern), key=lambda path: path.name)


@pytest.mark.parametrize("action", [["list"], ["resume"], ["drop", "--all", "--yes"]])
def test_what_another_user_staged_is_refused(staged: Tsck, theirs: Users, action: list[str]) -> None:
    refused = staged("staging", *action, *DISK)
    assert refused.code == 33
    assert f"by user {OTHER}" in refused.err
    assert "--accept-owner UID" in refused.err
    assert steps(staged) == [0]


def test_root_publishes_for_another_user(staged: Tsck, theirs: Users, tmp_path: Path) -> None:
    assert len(staged("staging", *ACCEPTED, "--json").json) == 2
    printed = re.findall("`tsck ([^`]+)`", staged("staging", *DISK).err)
    done = staged(*shlex.split(printed[0].replace("UID", str(OTHER))))
    assert (done.code, steps(staged), files(tmp_path)) == (0, [2, 1, 0], [])
    assert theirs.owners(folder_of(tmp_path)) == {OTHER}, "it was given back, with the copies that were made"
    assert staged("fsck", "--read-data").code == 0


def test_root_drops_for_another_user(staged: Tsck, theirs: Users, tmp_path: Path) -> None:
    assert staged("staging", "drop", "--all", "--yes", *ACCEPTED).code == 0
    assert (steps(staged), files(tmp_path)) == ([0], [])
    assert theirs.owners(folder_of(tmp_path)) == {OTHER}


def test_another_user_than_the_one_who_is_named(staged: Tsck, theirs: Users, tmp_path: Path) -> None:
    refused = staged("staging", "resume", *DISK, "--accept-owner", "4321")
    assert (refused.code, f"not owned by user 4321, but by user {OTHER}" in refused.err) == (33, True)
    assert theirs.owners(folder_of(tmp_path)) == {OTHER}
    assert steps(staged) == [0]


def test_only_root_takes_a_folder_over(staged: Tsck, theirs: Users, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(take_over, "os", SimpleNamespace(geteuid=lambda: 99))
    refused = staged("staging", "resume", *ACCEPTED)
    assert (refused.code, "only root can" in refused.err) == (33, True)


@pytest.mark.parametrize("attack", ["link", "fifo", "hard link"])
def test_a_folder_with_links_is_not_taken_over(staged: Tsck, theirs: Users, tmp_path: Path, attack: str) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes").write_text("precious")
    pack = newest(tmp_path, "unsent/packs/*/*")
    ON_FILES[attack](pack, tmp_path / "home", theirs)
    theirs.give(pack)  # of a hard link the file, too
    refused = staged("staging", "resume", *ACCEPTED)
    assert (refused.code, str(pack) in refused.err) == (33, True)
    assert theirs.owners(folder_of(tmp_path)) == {OTHER}, "it was given back"
    assert steps(staged) == [0]


@pytest.mark.parametrize("what", ["users", "unsent/packs/*/*"])
def test_a_folder_in_use_is_not_taken_over(staged: Tsck, theirs: Users, tmp_path: Path, what: str) -> None:
    """By a job, or by a process that waits to write into a pack that was verified."""
    with newest(tmp_path, what).open("r+b") as file:
        if what == "users":
            fcntl.flock(file, fcntl.LOCK_SH)
        refused = staged("staging", "resume", *ACCEPTED)
    assert (refused.code, f"in use by a process of user {OTHER}" in refused.err) == (22, True)
    assert theirs.owners(folder_of(tmp_path)) == {OTHER}
    assert staged("staging", "resume", *ACCEPTED).code == 0


def damage_pack(tmp_path: Path) -> str:
    pack = newest(tmp_path, "unsent/packs/*/*")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    return "does not match its hash"


def exchange(tmp_path: Path, kind: str) -> None:
    """With the object of the other staged snapshot."""
    older = min(folder_of(tmp_path).glob(f"unsent/{kind}/*/*"), key=lambda path: path.name)
    newest(tmp_path, f"unsent/{kind}/*/*").write_bytes(older.read_bytes())


def exchange_record(tmp_path: Path) -> str:
    exchange(tmp_path, "snapshots")
    return "is not the record that the log names"


def exchange_part(tmp_path: Path) -> str:
    exchange(tmp_path, "parts")
    return "is not the part that its snapshot names"


def forge_manifest(tmp_path: Path, **changes: Any) -> Manifest:
    path = newest(tmp_path, "staged/*")
    manifest = decode_manifest(path.read_bytes(), path.name)._replace(**changes)
    path.write_bytes(manifest.encode())
    return manifest


def other_snapshot(tmp_path: Path) -> str:
    """The log says that another one was staged under this name."""
    manifest = forge_manifest(tmp_path)
    assert manifest.lead is not None
    record = decode_record(manifest.lead.record, manifest.key)._replace(metadata=pack_body({"forged": True}))
    forge_manifest(tmp_path, lead=manifest.lead._replace(record=record.encode()))
    return "it was exchanged"


def take_the_name_of_a_pack(tmp_path: Path) -> str:
    """Which would be deleted in the store, as what a torn upload left, and written again."""
    before = {*(tmp_path / "ck" / "packs").glob("*/*")}
    with tsck_package.open(tmp_path / "ck", cache_dir=tmp_path / "cache") as store:
        store.put_snapshot({"other": torch.full((50_000,), 3)}, ref="other")
    stored = max({*(tmp_path / "ck" / "packs").glob("*/*")} - before)
    name = str(stored.relative_to(tmp_path / "ck"))
    planted = folder_of(tmp_path) / "unsent" / name
    planted.parent.mkdir(parents=True, exist_ok=True)
    planted.write_bytes(b"\0" * stored.stat().st_size)
    UploadJournal(LocalBackend(str(folder_of(tmp_path)))).write(JournalEntry(name))
    manifest = forge_manifest(tmp_path)
    forge_manifest(tmp_path, names=[*manifest.names, name])
    return f"the store has {name} already, with other bytes"


def take_the_name_of_a_record(tmp_path: Path) -> str:
    """Of a snapshot that somebody else has staged elsewhere, and could no longer publish."""
    manifest = forge_manifest(tmp_path)
    name = record_name(new_ulid())
    (folder_of(tmp_path) / "unsent" / name).parent.mkdir(parents=True, exist_ok=True)
    (folder_of(tmp_path) / "unsent" / name).write_bytes(b"not the record")
    forge_manifest(tmp_path, names=[*manifest.names, name])
    return f"names {name}, which is of another snapshot"


def name_another_branch(tmp_path: Path) -> str:
    """Which the user may not write to."""
    manifest = forge_manifest(tmp_path)
    assert manifest.lead is not None
    forge_manifest(tmp_path, ref="release", lead=manifest.lead._replace(accepts=ANY))
    return "names another branch than 'job'"


ATTACKS: list[Callable[[Path], str]] = [
    damage_pack,
    exchange_record,
    exchange_part,
    other_snapshot,
    take_the_name_of_a_pack,
    take_the_name_of_a_record,
    name_another_branch,
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_another_user_staged_is_verified(staged: Tsck, theirs: Users, tmp_path: Path, attack: Callable[[Path], str]) -> None:
    message = attack(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "ck").rglob("*") if path.is_file() and "log" not in path.parts}
    theirs.give_all(folder_of(tmp_path))
    done = staged("staging", "resume", *ACCEPTED)
    assert done.code != 0
    assert message in done.out, done
    assert steps(staged) == [1, 0], "the other one is as it was staged"
    assert {path: path.read_bytes() for path in before} == before
    assert staged("fsck", "--read-data").code == 0


def test_a_manifest_names_nothing_but_what_is_staged(staged: Tsck, tmp_path: Path) -> None:
    """`store.json` would be replaced by what lies under that name on the disk."""
    manifest = forge_manifest(tmp_path)
    (folder_of(tmp_path) / "unsent" / "store.json").write_text("{}")
    before = (tmp_path / "ck" / "store.json").read_bytes()
    forge_manifest(tmp_path, names=[*manifest.names, "store.json"])
    staged("staging", "resume", *DISK)
    assert steps(staged) == [1, 0]
    assert (tmp_path / "ck" / "store.json").read_bytes() == before


def test_a_store_that_does_not_answer_leaves_the_list_of_the_disk(staged: Tsck, monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(*_: object, **__: object) -> None:
        raise BackendUnavailableError("injected")

    known = staged("staging", *DISK, "--json").json
    monkeypatch.setattr(StoreChoice, "open_engine", silent)
    shown = staged("staging", *DISK)
    assert (shown.code, shown.out.count("unknown"), "injected" in shown.err) == (13, 2, True), shown
    for line, put in zip(shown.out.splitlines()[1:], known, strict=True):
        assert line.split()[:4] == [put["txn"], "job", str(put["step"]), short_root(put["root"])]
        assert line.split()[-2:] == [socket.gethostname(), str(folder_of(Path.cwd()))]
    assert staged("staging").code == 13

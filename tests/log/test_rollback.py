"""A log that goes back, or forks, after this user has read more of it: every command warns until a person accepts it."""

import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.ids import Digest
from tensorstore_ck.errors import BrokenLogError, InvalidOptionError, LogChangedError
from tensorstore_ck.log import Head, HeadFile, Log, LogChangedWarning, Watermark
from tensorstore_ck.log.entry import entry_name
from tensorstore_ck.log.head_file import SeenHead
from tests.log.scripted import append_puts, open_log


class Host:
    """A user's view of one store: a store, a cache and a state folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store, self.cache, self.state = folder, folder / "ck", folder / "cache", folder / "state"

    def open(self, **options: Any) -> tsck.Store:
        settings = {"create": True, "no_sync": True, "cache_dir": self.cache, "state_dir": self.state, **options}
        opened: tsck.Store = tsck.open(self.store, **settings)
        return opened

    def put(self, *steps: int, value: float = 0.0, **options: Any) -> None:
        with self.open(**options) as store:
            for step in steps:
                store.put_snapshot({"w": torch.full((4,), value + step)}, ref="r", step=step, expect=tsck.ANY)

    def steps(self, **options: Any) -> list[int | None]:
        with self.open(**options) as store:
            return [found.step for found in store.log("r")]

    def attack(self, kind: str) -> None:
        """Three entries of six are removed or replaced."""
        entries = sorted(path for path in (self.store / "log").rglob("*") if path.is_file())
        for path in entries[3:]:
            path.unlink()
        if kind != "truncated":
            mallory = {"cache_dir": self.folder / "mallory", "state_dir": self.folder / "mallory-state"}
            self.put(*range(4, 7 if kind == "forked" else 9), value=100.0, **mallory)

    def accept(self) -> Head | None:
        with self.open(read_only=True, create=False) as store, warnings.catch_warnings():
            warnings.simplefilter("ignore", LogChangedWarning)
            return store.engine.log.accept()[1]

    def files(self) -> dict[str, bytes]:
        return {str(path): path.read_bytes() for path in sorted(self.store.rglob("*")) if path.is_file()}


@pytest.fixture
def renames(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The writes of state files."""
    done: list[object] = []
    rename = os.rename

    def noted(*args: Any, **options: Any) -> None:
        done.append(args)
        rename(*args, **options)

    monkeypatch.setattr(os, "rename", noted)
    return done


# --- it warns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "has_cache"), [("truncated", True), ("forked", False), ("forked and longer", True)])
def test_every_command_warns_until_it_is_accepted(host: Host, kind: str, has_cache: bool) -> None:
    host.attack(kind)
    if not has_cache:
        shutil.rmtree(host.cache)
    there = {"truncated": 3, "forked": 6, "forked and longer": 8}[kind]
    for _ in range(2):
        with pytest.warns(LogChangedWarning, match=entry_name("log", 6)) as caught:
            assert host.steps() == list(range(there, 0, -1))
        assert len(caught) == 1
        with pytest.warns(LogChangedWarning, match=r"tsck accept-log -s "):
            host.put(there := there + 1)
    gone = host.accept()
    assert gone is not None
    assert gone.n == 6
    assert host.steps() == list(range(there, 0, -1))
    host.put(there + 1)
    assert host.accept() is None
    shutil.rmtree(host.cache)
    assert host.steps() == list(range(there + 1, 0, -1))


def test_a_store_restored_from_a_copy_is_accepted_once(host: Host) -> None:
    shutil.copytree(host.store, host.folder / "copy")
    host.put(7, 8)
    shutil.rmtree(host.store)
    (host.folder / "copy").rename(host.store)
    with pytest.warns(LogChangedWarning, match="or was restored"):
        assert host.steps()[0] == 6
    assert host.accept() is not None
    host.put(7, 8, 9)
    assert host.steps()[0] == 9


@pytest.mark.parametrize(("kind", "state"), [("truncated", "state"), ("forked", None), ("forked and longer", "state")])
def test_a_process_that_goes_on_finds_it_at_its_next_refresh(host: Host, kind: str, state: str | None) -> None:
    options = {} if state else {"state_dir": os.devnull}
    with host.open(**options) as store:
        assert len(store.log("r")) == 6
        host.attack(kind)
        with pytest.warns(LogChangedWarning):
            newest = store.log("r")[0]
        store.log("r")  # once in this process: it has warned
        assert newest.step == {"truncated": 3, "forked": 6, "forked and longer": 8}[kind]


@pytest.mark.parametrize(("kind", "step"), [("truncated", 3), ("forked", 6), ("forked and longer", 8)])
def test_a_follower_finds_it_at_its_next_poll(host: Host, kind: str, step: int) -> None:
    mine = {"w": torch.zeros(4)}
    with host.open() as store, store.follow("r", into=mine) as feed:
        feed.poll()
        feed.swap()
        host.attack(kind)
        with pytest.warns(LogChangedWarning):
            feed.poll()
        version = feed.swap()
    assert version is not None
    assert version.step == step
    assert mine["w"][0] == (step if kind == "truncated" else 100 + step)


def test_entries_that_are_missing_before_one_that_was_read_are_a_broken_log(host: Host) -> None:
    (host.store / entry_name("log", 5)).unlink()
    shutil.rmtree(host.cache)
    with pytest.warns(tsck.BrokenLogWarning, match=f"as of log entry 4, .*{entry_name('log', 5)}"):
        assert host.steps() == [4, 3, 2, 1]
    with pytest.raises(BrokenLogError, match=entry_name("log", 5)):
        host.steps(rollback="error")


def test_fsck_finds_it(host: Host) -> None:
    host.attack("forked and longer")
    shutil.rmtree(host.cache)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LogChangedWarning)
        with host.open() as store:
            (found,) = [found for found in store.fsck().findings if found.severity == "error"]
        assert (found.kind, found.object) == ("broken_log", entry_name("log", 6))
        assert "`tsck accept-log -s " in found.message
        host.accept()
    with host.open() as store:
        assert store.fsck().ok


# --- as an error ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "has_cache"), [("truncated", False), ("forked", True), ("forked and longer", False)])
def test_as_an_error_nothing_is_read_or_written_until_it_is_accepted(host: Host, kind: str, has_cache: bool) -> None:
    with pytest.raises(InvalidOptionError, match="rollback"):
        host.open(rollback="ignore")
    with host.open(rollback="error") as early:
        early.log("r")
        host.attack(kind)
        if not has_cache:
            shutil.rmtree(host.cache)
        before = host.files()
        with host.open(rollback="error") as late:
            for store in (early, late):
                for _ in range(2):
                    with pytest.raises(LogChangedError, match="tsck accept-log"):
                        store.put_snapshot({"w": torch.ones(4)}, ref="r", step=10)
                    with pytest.raises(LogChangedError):
                        store.checkout("r")
            assert host.files() == before
            host.accept()
            for store in (early, late):
                assert store.log("r")
                store.put_snapshot({"w": torch.ones(4)}, ref="r", step=10, expect=tsck.ANY)


def test_as_an_error_the_cache_is_a_witness_too(host: Host) -> None:
    host.attack("truncated")
    shutil.rmtree(host.state)
    for _ in range(2):
        with pytest.raises(LogChangedError):
            host.steps(rollback="error", state_dir=os.devnull)


def test_what_the_cache_alone_knew_is_reported_by_every_command(host: Host) -> None:
    host.attack("truncated")
    shutil.rmtree(host.state)
    for _ in range(2):
        with pytest.warns(LogChangedWarning):
            host.steps()
    host.accept()
    host.steps()


# --- it is silent -----------------------------------------------------------------------------------------------------


def test_without_state_and_cache_nothing_is_known(host: Host) -> None:
    host.attack("forked")
    shutil.rmtree(host.state)
    shutil.rmtree(host.cache)
    assert host.steps() == [6, 5, 4, 3, 2, 1]


def test_a_store_that_was_recreated_at_the_same_location(host: Host) -> None:
    shutil.rmtree(host.store)
    host.put(1)
    assert host.steps() == [1]


def test_undo_gc_and_several_users_are_no_rollback(host: Host) -> None:
    with host.open(rollback="error") as one, host.open(rollback="error", cache_dir=host.folder / "other") as other:
        for step in range(7, 70):  # past a checkpoint
            (one if step % 2 else other).put_snapshot({"w": torch.full((4,), step)}, ref="r", step=step, expect=tsck.ANY)
        one.forget("r@3", "r@4")
        other.undo()
        other.forget("r@5")
        one.gc()
    shutil.rmtree(host.cache)
    assert len(host.steps(rollback="error")) == 68


def test_caches_of_other_hosts_that_hold_what_was_dismissed_are_silent(host: Host) -> None:
    host.steps(cache_dir=host.folder / "other")
    host.attack("truncated")
    host.accept()
    assert host.steps(cache_dir=host.folder / "other", rollback="error") == [3, 2, 1]


def test_a_process_that_knew_more_does_not_bring_back_what_was_dismissed(host: Host) -> None:
    with host.open() as store:
        store.put_snapshot({"w": torch.ones(4)}, ref="r", step=7, expect=tsck.ANY)
        host.attack("truncated")
        host.accept()
    assert host.steps() == [3, 2, 1]


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_file_is_private_and_lies_in_the_users_state_folder(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(host.folder / "xdg"))
    host.steps(state_dir=None)
    folder = host.folder / "xdg" / "tensorstore_ck"
    (file,) = folder.iterdir()
    assert file.name.startswith("head-")
    assert (stat.S_IMODE(folder.stat().st_mode), stat.S_IMODE(file.stat().st_mode)) == (0o700, 0o600)


def planted_folder(state: Path) -> None:
    state.rename(state.with_name("elsewhere"))
    state.symlink_to("elsewhere")


def open_folder(state: Path) -> None:
    state.chmod(0o777)


def planted_link(state: Path) -> None:
    (file,) = state.iterdir()
    file.rename(state.with_name("elsewhere"))
    file.symlink_to("../elsewhere")


def open_file(state: Path) -> None:
    (file,) = state.iterdir()
    file.chmod(0o666)


def no_folder(state: Path) -> None:
    shutil.rmtree(state)
    state.write_text("")


@pytest.mark.parametrize("plant", [planted_folder, open_folder, planted_link, open_file, no_folder])
def test_what_others_could_have_written_counts_for_nothing_and_stops_no_save(host: Host, plant: Callable[[Path], None]) -> None:
    plant(host.state)
    elsewhere = host.folder / "elsewhere"
    before = elsewhere.read_bytes() if elsewhere.is_file() else None
    host.attack("forked")
    shutil.rmtree(host.cache)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        host.put(7, rollback="error")
        assert host.steps(rollback="error")[0] == 7
    assert any("is not noticed on this host" in str(each.message) for each in said) == (plant in (open_folder, open_file))
    assert before is None or elsewhere.read_bytes() == before


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"n": -1}', b"\xff" * 5000, b'{"n": 9, "hash": "00", "accepted_ns": 0, "dismissed_n": 0}']
)
def test_a_file_that_is_damaged_is_lost(host: Host, content: bytes) -> None:
    (file,) = host.state.iterdir()
    good = file.read_bytes()
    file.write_bytes(content)
    assert host.steps(rollback="error")[0] == 6
    assert file.read_bytes() == good, "made anew"
    file.unlink()
    os.mkfifo(file)  # which must not hold up a command
    assert host.steps(rollback="error")[0] == 6


HASHES = [Digest(bytes([n]) * 32) for n in range(10)]


def known(n: int) -> SeenHead:
    return SeenHead(Head(n, HASHES[n]))


def test_of_several_writers_one_wins_and_the_others_get_its_value(tmp_path: Path) -> None:
    file = HeadFile(tmp_path / "state", "key")
    assert file.swap(None, known(3)) == known(3)
    assert file.swap(None, known(2)) == known(3) == file.read()
    lock = tmp_path / "state" / "head-key.json.new"
    lock.touch()
    assert file.swap(known(3), known(4)) == known(3), "another one writes just now"
    os.utime(lock, (0, 0))
    file.swap(known(3), known(4))
    assert file.swap(known(3), known(4)) == known(4) == file.read(), "it was killed"
    assert not lock.exists()


def logs(folder: Path, backend: MemoryBackend, seconds: Iterator[float]) -> Log:
    return open_log(backend, watermark=Watermark(HeadFile(folder, "key"), rollback="error", monotonic=lambda: next(seconds)))


def test_many_processes_that_open_a_store_write_once(tmp_path: Path, renames: list[object]) -> None:
    backend = MemoryBackend()
    append_puts(open_log(backend), 5)
    ranks = [logs(tmp_path, backend, iter(range(1000))) for _ in range(50)]
    for rank in ranks:
        rank.sync()
    assert len(renames) == 1
    for number in range(5, 20):  # rank 0 publishes, the others follow
        append_puts(ranks[0], 1, first=number)
        for rank in ranks:
            rank.sync()
    for rank in ranks:
        rank.close()
    assert len(renames) <= 1 + 15, "of them only the one that publishes"
    found = HeadFile(tmp_path, "key").read()
    assert found is not None
    assert found.head.n == 20


def test_a_process_that_appends_often_writes_seldom(tmp_path: Path, renames: list[object]) -> None:
    backend = MemoryBackend()
    log = logs(tmp_path, backend, (count / 1000 for count in range(10**9)))
    append_puts(log, 100)
    assert len(renames) <= 2
    log.close()
    found = HeadFile(tmp_path, "key").read()
    assert found is not None
    assert found.head.n == 100


def test_two_processes_that_are_shown_different_logs_find_out(tmp_path: Path) -> None:
    """By the file that they share, though both have opened their store before either of them noted anything."""
    one, other = MemoryBackend(), MemoryBackend()
    first, second = (logs(tmp_path, backend, iter(range(0, 100_000, 20))) for backend in (one, other))
    first.sync()
    second.sync()
    append_puts(first, 3, "one")
    with pytest.raises(LogChangedError):
        append_puts(second, 5, "other")

"""Commands that are printed where something is damaged: each is taken from the output and run as it is, on the host that met the damage
and on another one. Following them ends with a store that is whole."""

import os
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import pytest
from click.testing import CliRunner

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.cli import main
from tests.maintenance.fsck.stores import build

COMMAND: Final = re.compile(r"`tsck ([^`]+)`")
STORE: Final = ("-s", "the store")
FLIPPED_AT: Final = 100
HOSTS: Final = ("here", "elsewhere")
FOLDERS: Final = ("packs", "parts", "snapshots", "log", "")
HOWS: Final = ("gone", "cut", "flipped", "flipped at the end")


class Result(NamedTuple):
    code: int
    out: str

    @property
    def commands(self) -> list[str]:
        return list(dict.fromkeys(COMMAND.findall(self.out)))


Tsck = Callable[..., Result]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "store"
    build(LocalBackend(str(folder)))
    return folder


@pytest.fixture
def tsck(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tsck:
    """Runs commands next to ``the store``, of which ``copy`` is a copy. Each host has a cache of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(whole, "the store")
    shutil.copytree(whole, "copy")

    def run(*args: str, host: str = "here", store: str | None = None) -> Result:
        env = {"TSCK_CACHE_DIR": str(tmp_path / host), "TSCK_STORE": store}
        result = CliRunner().invoke(main, args, env=env, catch_exceptions=False)
        return Result(result.exit_code, result.stdout + result.stderr)

    return run


def arguments(command: str) -> list[str]:
    """As a shell takes a printed command apart; the other store is the only thing that a user fills in."""
    return shlex.split(command.replace("OTHER_STORE", "copy"))


def damage(folder: str, how: str, *, last: bool = False) -> str:
    """Damages the first or last object below a folder of the store; its name."""
    found = [path for path in Path("the store", folder or "store.json").rglob("*") if path.is_file()]
    path = sorted(found, key=lambda path: path.name)[-1 if last else 0] if folder else Path("the store/store.json")
    data = bytearray(path.read_bytes())
    match how:
        case "gone":
            path.unlink()
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case _:
            data[FLIPPED_AT if how == "flipped" else -5] ^= 1
            path.write_bytes(data)
    return str(path.relative_to("the store"))


def follow(tsck: Tsck, result: Result, host: str) -> Result:
    """Runs the last command that was printed, and so on, until none is printed; the last result."""
    for _ in range(4):
        if not result.commands:
            return result
        command = result.commands[-1]
        result = tsck(*arguments(command), host=host)
        assert result.code == 0 or "--repair" not in command, result.out
    raise AssertionError(f"the printed commands lead nowhere: {result.out}")


def require_whole(tsck: Tsck) -> None:
    result = tsck("fsck", "--read-data", *STORE, host="a third")
    assert (result.code, "no errors" in result.out.splitlines()) == (0, True), result.out


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder or "store.json")
def test_what_fsck_prints(tsck: Tsck, folder: str, how: str) -> None:
    """Checks with and without reading data, and the hosts that follow, take turns."""
    number = FOLDERS.index(folder) + HOWS.index(how)
    check, host = (("fsck",), ("fsck", "--read-data"))[number % 2], HOSTS[number // 2 % 2]
    for last in (True, False) if folder == "packs" else (False,):  # the newest pack is damaged in data alone
        name = damage(folder, how, last=last)
        found = tsck(*check, *STORE)
        if found.code == 0:
            assert (folder, check) == ("packs", ("fsck",))
            assert "no errors in what was checked" in found.out.splitlines()
            found = tsck("fsck", "--read-data", *STORE)
        assert found.code != 0
        assert name in found.out
        assert "no errors" not in found.out
        assert found.commands
        assert follow(tsck, found, host).code == 0
        require_whole(tsck)


def test_repair_alone_takes_what_this_host_found(tsck: Tsck) -> None:
    name = damage("packs", "flipped", last=True)
    assert tsck("fsck", "--read-data", *STORE).code == 40
    elsewhere = tsck("fsck", "--repair", *STORE, host="elsewhere")
    assert "data not read (--read-data does)" in elsewhere.out
    assert "no errors in what was checked" in elsewhere.out.splitlines()
    tsck("log", *STORE)
    again = tsck("fsck", *STORE)
    assert (again.code, name in again.out, "no errors" in again.out) == (40, True, False)
    repaired = tsck("fsck", "--repair", "--from", "copy", *STORE)
    assert (repaired.code, f"repaired  {name}" in repaired.out) == (0, True)
    require_whole(tsck)


def test_what_a_repair_left_damaged_is_known_to_every_host(tsck: Tsck) -> None:
    damage("packs", "flipped", last=True)
    marked = tsck("fsck", "--read-data", "--repair", *STORE)
    assert (marked.code, "marked damaged" in marked.out) == (40, True)
    found = tsck("fsck", *STORE, host="elsewhere")
    assert (found.code, "marked_damaged" in found.out or "corrupt_object" in found.out) == (40, True)
    repaired = tsck("fsck", "--repair", "--from", "copy", *STORE, host="a fourth")
    assert repaired.code == 0
    assert "no longer damaged" in repaired.out
    assert tsck("fsck", *STORE, host="elsewhere").code == 0
    require_whole(tsck)


@pytest.mark.parametrize(
    ("folder", "command"),
    [
        *((folder, "get runs/a@1 out.pt") for folder in ("packs", "parts", "snapshots")),
        *((folder, "log") for folder in ("log", "")),
        *((folder, "gc --dry-run") for folder in ("parts", "snapshots")),
    ],
)
def test_what_others_print_leads_to_fsck(tsck: Tsck, folder: str, command: str) -> None:
    name = damage(folder, "flipped", last=folder == "packs")
    result = tsck(*command.split(), *STORE)
    for printed in result.commands:
        verb = printed.split()[0]
        if verb in ("fsck", "salvage"):
            led = tsck(*arguments(printed), host="elsewhere")
            assert led.code in (0, 40)
            assert name in led.out or led.code == 0
    assert result.code == 0 or result.commands


@pytest.mark.parametrize("address", ["runs/a@1", "runs/a@3", "paper"])
def test_what_gc_prints_lets_a_snapshot_go(tsck: Tsck, address: str) -> None:
    record = tsck("show", address, "--json", *STORE)
    pinned = tsck("pin", "runs/a@3", "--owner", "the night's job", *STORE)
    assert (record.code, pinned.code) == (0, 0)
    root = re.search(r'"root": "([0-9a-f]+)"', record.out)
    snapshot = re.search(r'"id": "([0-9A-Z]{26})"', record.out)
    assert root is not None
    assert snapshot is not None
    Path(f"the store/snapshots/{snapshot[1][-2:]}/{snapshot[1]}").unlink()
    refused = tsck("gc", *STORE)
    assert refused.code == 45
    for printed in refused.commands:
        if not printed.startswith("fsck"):
            led = tsck(*arguments(printed))
            assert led.code == 0, led.out
    assert "its undo window has ended" in refused.out
    assert tsck("gc", "--undo-window", "0s", "--max-delete", "100%", *STORE).code == 0  # as if it had
    assert root[1][:12] not in tsck("log", "runs/a", *STORE).out
    require_whole(tsck)


def test_the_store_is_named_wherever_it_was_given(tsck: Tsck) -> None:
    damage("packs", "gone")
    (given,) = tsck("fsck", *STORE).commands
    assert given == shlex.join(["fsck", "--repair", "--from", "OTHER_STORE", "-s", os.path.abspath("the store")])
    (known,) = tsck("fsck", store="the store").commands
    assert known == given
    assert tsck(*arguments(known)).code == 0
    (made,) = tsck("log", "--store", "new").commands
    assert tsck(*arguments(made)).code == 0
    assert tsck("log", "-s", "new").code == 0


@pytest.mark.filterwarnings("default")
def test_a_lost_newest_entry_that_only_the_record_of_the_user_knows(tsck: Tsck) -> None:
    """The cache of this host is gone, and so does not know it."""
    user = ("--state-dir", "state", *STORE)
    assert tsck("log", *user).code == 0
    name = damage("log", "gone", last=True)
    assert tsck("fsck", *user, host="elsewhere").code == 40
    repaired = tsck("fsck", "--repair", "--from", "copy", *user, host="elsewhere")
    assert (repaired.code, f"repaired  {name}" in repaired.out) == (0, True), repaired.out
    assert Path("the store", name).read_bytes() == Path("copy", name).read_bytes()

"""The states in which commands are printed, and what each printed command does there, for `test_hints`."""

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import torch
from click.testing import CliRunner

import tensorstore_ck as tsck
from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME
from tensorstore_ck.backend.durable_folders import TEMPORARY_PREFIX
from tensorstore_ck.cli import main
from tensorstore_ck.format.sealed import seal
from tensorstore_ck.integrations.trainer.saves import require_own_ref
from tensorstore_ck.log.entry import entry_name
from tensorstore_ck.maintenance import copy_store


class Home(Protocol):
    """Where the store of a case is, as its objects and its URL."""

    url: str
    options: dict[str, Any]
    folder: Path
    """For other files; the current folder."""

    def names(self, prefix: str) -> list[str]:
        """Its objects, sorted."""

    def read(self, name: str) -> bytes:
        """One of them."""

    def write(self, name: str, data: bytes) -> None:
        """Writes or replaces one."""

    def delete(self, name: str) -> None:
        """Deletes one."""


class Hint(NamedTuple):
    """What a printed command does."""

    code: int = 0
    cures: bool = False
    """Whether what was tried works afterwards, and prints nothing more to follow."""
    filled: dict[str, str] = {}  # noqa: RUF012 - never changed
    """What a user writes for its placeholders."""
    after: str = ""
    """The beginning of the printed command that comes before it."""


class Case(NamedTuple):
    """A state of a store, what prints commands there, and these."""

    make: Callable[[Home], object]
    tried: str | Callable[[tsck.Store], object]
    """A command; or what a program does with the store."""
    code: int
    hints: dict[str, Hint]
    """By their first words."""
    only_folders: bool = False


def open_store(home: Home, **options: Any) -> tsck.Store:
    store: tsck.Store = tsck.open(home.url, storage_options=home.options, **options)
    return store


def save(home: Home, ref: str, steps: range, **options: Any) -> None:
    with open_store(home, create=True) as store:
        for step in steps:
            store.put_snapshot({"w": torch.arange(30_000) + 100_000 * step, "step": step}, ref=ref, step=step, expect=tsck.ANY, **options)


def history(home: Home) -> None:
    """Steps 1 to 3 of runs/gpt; and a copy of the store, `mirror`, as another store."""
    save(home, "runs/gpt", range(1, 4))
    mirror(home)


def mirror(home: Home) -> None:
    """A copy of all objects, with its uuid."""
    for name in home.names(""):
        path = home.folder / "a mirror" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(home.read(name))


def ordered(home: Home, prefix: str) -> list[str]:
    """The objects whose names begin so, oldest first."""
    return sorted(home.names(prefix), key=lambda name: name.rpartition("/")[2])


def without(prefix: str, number: int = -1) -> Callable[[Home], None]:
    """The history without one object."""

    def make(home: Home) -> None:
        history(home)
        home.delete(ordered(home, prefix)[number])

    return make


def damaged(prefix: str, number: int = -1) -> Callable[[Home], None]:
    """The history with one flipped bit."""

    def make(home: Home) -> None:
        history(home)
        name = ordered(home, prefix)[number]
        data = bytearray(home.read(name))
        data[len(data) // 2] ^= 1
        home.write(name, bytes(data))

    return make


def forget_host(make: Callable[[Home], object]) -> Callable[[Home], None]:
    """The same on a host that has never seen the store."""

    def made(home: Home) -> None:
        make(home)
        os.environ["XDG_CACHE_HOME"] = os.environ["XDG_STATE_HOME"] = str(home.folder / "another host")

    return made


def model_file(home: Home) -> None:
    torch.save({"w": torch.ones(3)}, home.folder / "model.pt")


def new(home: Home) -> None:
    open_store(home, create=True).close()
    model_file(home)


def marked(home: Home) -> None:
    history(home)
    with open_store(home) as store:
        store.mark("runs/gpt", "bad", reason="a spike")


def over_quota(home: Home) -> None:
    history(home)
    model_file(home)
    with open_store(home) as store:
        store.set_quota("runs/*", refuse=1)


def forgotten(home: Home) -> None:
    history(home)
    with open_store(home) as store:
        store.forget("runs/gpt@1")


def measured(home: Home) -> None:
    for step in (1, 2, 3):
        save(home, "runs/gpt", range(step, step + 1), metrics={"loss": 4.0 - step})


def diverged(home: Home) -> None:
    history(home)
    target = home.folder / "a target"
    with tsck.open(target, create=True) as store:
        store.put_snapshot({"other": 1}, ref="runs/gpt", step=1)


def lost_entry_and_record(home: Home) -> None:
    history(home)
    with open_store(home) as store, tsck.open(home.folder / "a copy", create=True) as other:
        copy_store.copy(store, other)
    home.delete(ordered(home, "log/")[1])
    home.delete(ordered(home, "snapshots/")[0])


def a_tag_there(home: Home) -> None:
    history(home)
    with tsck.open(home.folder / "a target", create=True) as store:
        store.put_snapshot({"other": 1}, ref="other", step=1)
        store.tag("runs/gpt", "other")


def tagged_apart(home: Home) -> None:
    history(home)
    with open_store(home) as store, tsck.open(home.folder / "a target", create=True) as target:
        store.tag("v1", "runs/gpt")
        target.put_snapshot({"other": 1}, ref="other", step=1)
        target.tag("v1", "other")


def went_apart(home: Home) -> None:
    """The copy and the original were both used."""
    history(home)
    save(home, "runs/gpt", range(4, 6))
    with open_store(home) as store:
        store.engine.log.sync()
    for path in sorted((home.folder / "a mirror").rglob("*")):
        if path.is_file():
            home.write(str(path.relative_to(home.folder / "a mirror")), path.read_bytes())
    for name in home.names("log/"):
        if not (home.folder / "a mirror" / name).exists():
            home.delete(name)


def stale_upload(home: Home) -> None:
    history(home)
    path = Path(home.url, home.names("packs/")[0]).parent / f"{TEMPORARY_PREFIX}1"
    path.write_bytes(b"half")
    os.utime(path, (time.time() - 200_000,) * 2)


def type_there(home: Home, *words: str) -> None:
    """Runs a command on the store, which must succeed."""
    result = CliRunner().invoke(main, [*words, "-s", home.url], catch_exceptions=False)
    assert result.exit_code == 0, result.output


def on_another_disk(home: Home) -> None:
    """All packs were moved to a location, which has lost its marker."""
    history(home)
    cold = home.folder / "a cold disk"
    type_there(home, "policy", "set", "runs/*", f"move_after=0.001s:{cold}")
    type_there(home, "tier")
    type_there(home, "gc", "--min-age", "0s", "--undo-window", "0s", "--max-delete", "100%")
    next(path for path in cold.rglob(MARKER_NAME)).unlink()


def entry_of_a_newer_build(home: Home) -> None:
    """The log ends with an operation that this build does not know."""
    history(home)
    with open_store(home) as store:
        head = store.engine.log.view().head()
    assert head is not None
    body = {
        "n": head.n + 1,
        "prev": head.hash,
        "write_id": bytes(16),
        "time_ns": 1,
        "actor": "newer",
        "ops": [{"op": "x", "critical": True}],
    }
    home.write(entry_name("log", head.n + 1), seal("log", {**body, "signatures": []}))


def lost_end_of_a_branch(home: Home) -> None:
    """Of a branch that was forgotten then."""
    history(home)
    save(home, "runs/other", range(1, 3))
    with open_store(home) as store:
        store.forget("runs/other")
        store.gc(tsck.GcOptions(undo_window_seconds=0, min_age_seconds=0, max_delete=1.0, grace_seconds=3600))
        store.put_snapshot({"w": 1}, ref="runs/new", step=1)
    mirror(home)
    home.delete(ordered(home, "log/")[-3])


def old_catalog(home: Home) -> None:
    """A catalog that another build has made."""
    history(home)
    type_there(home, "catalog", "sync", "--db", "a catalog")
    with contextlib.closing(sqlite3.connect(home.folder / "a catalog")) as connection, connection:
        connection.execute("UPDATE catalog_version SET version = 0")


def save_as_another_job(store: tsck.Store) -> object:
    return store.put_snapshot({"w": torch.ones(3)}, ref="runs/gpt", step=9)


def save_staged_apart(store: tsck.Store) -> object:
    require_own_ref(store, "runs/gpt", "resume=True")
    return None


STORE: Final = {"STORE": "the store"}
"""It is replaced by the store's URL."""
MIRROR: Final = {"OTHER_STORE": "a mirror"}
COPY: Final = {"OTHER_STORE": "a copy"}
FROM_MIRROR: Final = Hint(cures=True, filled=MIRROR)
FINDS: Final = Hint(40)
LOST_ENTRY: Final = {"fsck": FINDS, "fsck --repair": FROM_MIRROR, "salvage": Hint(cures=True)}

CASES: Final[dict[str, Case]] = {
    "no store": Case(model_file, "log", 30, {"init": Hint(cures=True)}),
    "no snapshots": Case(new, "log", 0, {"put": Hint(filled={"FILE": "model.pt", "NAME": "runs/new"}, cures=True)}),
    "no tags": Case(history, "tag", 0, {"tag": Hint(filled={"NAME": "v1", "ADDRESS": "runs/gpt"}, cures=True)}),
    "no pins": Case(history, "pin", 0, {"pin": Hint(filled={"ADDRESS": "runs/gpt"}, cures=True)}),
    "no quotas": Case(history, "quota", 0, {"quota": Hint(filled={"GLOB": "runs/*", "SIZE": "1TB"}, cures=True)}),
    "no policies": Case(history, "policy", 0, {"policy": Hint(cures=True)}),
    "no such policy": Case(history, "policy remove x", 25, {"policy show": Hint()}),
    "no such quota": Case(history, "quota remove x", 25, {"quota": Hint()}),
    "no such step": Case(history, "show runs/gpt@7", 25, {"log": Hint()}),
    "nothing to undo": Case(history, "undo runs/x", 25, {"forget": Hint()}),
    "marked": Case(marked, "get runs/gpt out.pt", 36, {"log": Hint()}),
    "marked, in Python": Case(marked, lambda store: store.checkout("runs/gpt"), 36, {"log": Hint()}),
    "the head is to be forgotten": Case(history, "forget runs/gpt~0", 11, {"reset": Hint(), "forget": Hint()}),
    "over its quota": Case(
        over_quota,
        "put model.pt --ref runs/gpt",
        47,
        {"forget": Hint(), "policy apply": Hint(), "gc": Hint(), "quota set 'runs/*' --refuse": Hint(filled={"SIZE": "1TB"}, cures=True)},
    ),
    "a search": Case(measured, "bisect runs/gpt --metric 'loss < 2.5'", 0, {"diff": Hint()}),
    "a lost log entry": Case(forget_host(without("log/", 1)), "log", 0, LOST_ENTRY),
    "a damaged log entry": Case(forget_host(damaged("log/", 1)), "log", 0, LOST_ENTRY),
    "a lost newest entry": Case(
        without("log/"),
        "fsck",
        40,
        {"accept-log": Hint(cures=True), "fsck --repair": FROM_MIRROR, "salvage": Hint(cures=True), "log": Hint()},
    ),
    "a log that went back": Case(without("log/"), "log", 0, {"log": Hint(), "accept-log": Hint(cures=True)}),
    "store.json is damaged": Case(forget_host(damaged("store.json")), "log", 41, {"fsck": FINDS}),
    "store.json is damaged, says fsck": Case(damaged("store.json"), "fsck", 40, {"fsck --repair": Hint(cures=True)}),
    "store.json is gone": Case(without("store.json"), "log", 41, {"fsck": FINDS, "salvage": Hint(cures=True)}),
    "a damaged pack": Case(damaged("packs/"), "get runs/gpt out.pt", 41, {"fsck --read-data": FINDS}),
    "a damaged pack, in Python": Case(damaged("packs/"), lambda store: store.checkout("runs/gpt"), 41, {"fsck --read-data": FINDS}),
    "a lost pack, says fsck": Case(without("packs/"), "fsck", 40, {"fsck --repair": FROM_MIRROR}),
    "a damaged pack, says fsck": Case(damaged("packs/"), "fsck --read-data", 40, {"fsck --read-data --repair": FROM_MIRROR}),
    "a lost pack": Case(without("packs/"), "get runs/gpt out.pt", 42, {"fsck": FINDS}),
    "a lost pack, in Python": Case(without("packs/"), lambda store: store.checkout("runs/gpt"), 42, {"fsck": FINDS}),
    "a lost part": Case(without("parts/"), "show runs/gpt", 42, {"fsck": FINDS}),
    "a damaged part": Case(damaged("parts/"), "show runs/gpt", 41, {"fsck": FINDS}),
    "a damaged part, in Python": Case(damaged("parts/"), lambda store: store.checkout("runs/gpt"), 41, {"fsck": FINDS}),
    "a damaged part, says fsck": Case(damaged("parts/"), "fsck", 40, {"fsck --repair": FROM_MIRROR}),
    "a damaged record, says fsck": Case(damaged("snapshots/"), "fsck", 40, {"fsck --repair": FROM_MIRROR}),
    "gc with a damaged part": Case(damaged("parts/", 0), "gc", 45, {"fsck": FINDS, "forget": Hint()}),
    "an unfinished write": Case(stale_upload, "fsck", 0, {"fsck --abort-uploads": Hint(cures=True)}, only_folders=True),
    "the branch was moved": Case(history, save_as_another_job, 11, {"branch": Hint()}),
    "a trainer's branch": Case(history, save_staged_apart, 11, {"forget": Hint(cures=True)}),
    "copies diverged": Case(diverged, "copy STORE 'a target'", 11, {"branch": Hint(), "forget": Hint(cures=True)}),
    "a tag in place of a branch": Case(a_tag_there, "copy STORE 'a target'", 11, {"untag": Hint(cures=True)}),
    "a tag elsewhere": Case(tagged_apart, "copy STORE 'a target'", 11, {"untag": Hint(cures=True)}),
    "a copy of the files": Case(history, "copy STORE 'a mirror'", 22, {"init": Hint(filled={"URL": "a third"}), "adopt": Hint(cures=True)}),
    "a location without its marker": Case(
        on_another_disk, "get runs/gpt out.pt", 17, {"tier --claim-locations": Hint(cures=True)}, only_folders=True
    ),
    "an entry of a newer build": Case(entry_of_a_newer_build, "salvage", 31, {"salvage --leave-out-unknown": Hint(cures=True)}),
    "a snapshot and an entry are lost": Case(
        lost_entry_and_record,
        "salvage",
        0,
        {"fsck": Hint(), "branch": Hint(filled=COPY), "copy": Hint(filled=COPY, after="branch")},
    ),
    "a branch whose end is lost": Case(lost_end_of_a_branch, "salvage", 0, {"undo": Hint()}),
    "no catalog": Case(history, "find --db 'a catalog'", 25, {"catalog sync": Hint(cures=True, filled=STORE)}),
    "a catalog of another build": Case(old_catalog, "find --db 'a catalog'", 31, {"catalog rebuild": Hint(cures=True, filled=STORE)}),
    "a rule without its metric": Case(
        history,
        "policy set 'runs/*' keep_best=1:los:min",
        0,
        {"policy set": Hint(filled={"RULE=VALUE": "keep_last=5"}, cures=False)},
    ),
}

PROSE: Final = "named, not advised"
ELSEWHERE: Final = {
    "X": "inserted where it is printed",
    "XX XX": "the same",
    "export": PROSE,
    "exporter": PROSE,
    "find": PROSE,
    "import": PROSE,
    "show": PROSE,
    "ui": PROSE,
    "ui --allow": PROSE,
    "export --to hf": "tests/integrations/hf/test_adapters.py",
    "help KIND": "tests/cli/test_guidance.py",
    "import X --ref X": "tests/store/test_store.py: a checkpoint in a file",
    "probe": "tests/cli/test_errors.py: a server that ignores conditions",
    "keygen": "tests/cli/test_sign.py",
    "sign X --sign X": "tests/cli/test_sign.py",
    "reset X X --sign X": "tests/cli/test_sign.py",
    "staging resume --accept-owner UID --staging X": "tests/cli/test_staging.py: two users",
}
"""Commands in messages that no case prints, and where they are run as they are printed."""

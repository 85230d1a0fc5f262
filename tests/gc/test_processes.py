"""Real processes: writers, gcs and a reader on one store, killed, stopped and started again at random moments.

Nothing that was acknowledged is lost, no read is wrong, and what is left behind goes in two quiet runs of gc. ``GC_MINUTES`` makes it
longer, ``GC_SEED`` repeats the conductor's choices.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.engine.engine import Engine
from tensorstore_ck.engine.opening import open_engine
from tensorstore_ck.engine.reachability import locate_blocks
from tensorstore_ck.format.pack import ENTRY_DTYPE, HEADER, TRAILER
from tensorstore_ck.gc import GcOptions
from tensorstore_ck.gc.listing import list_objects
from tensorstore_ck.log import FOLDERS, ObjectKey
from tests.effort import PATIENCE_SECONDS, effort
from tests.gc.worker import GAVE_UP, WRITERS, Job, Nursery, digest, heard
from tests.servers import S3Server

MINUTES = float(os.environ.get("GC_MINUTES", effort("0.2", "0.5")))
MAX_WAIT_SECONDS = 2 * PATIENCE_SECONDS
ENOUGH = effort(2, 5)
"""Snapshots that each writer must have forgotten before the end."""
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=1)
PROCESSES = [("writer", 0), ("writer", 1), ("writer", 2), ("writer", 3), ("gc", 0), ("gc", 1), ("reader", 0)]
SHARE_A_CACHE = {("writer", 0), ("writer", 1), ("gc", 0)}
"""As processes of one host do; each of the others is a host of its own."""


class Conductor:
    """Starts the processes, and does to them what happens to processes."""

    def __init__(self, nursery: Nursery, url: str, options: dict[str, Any], folder: Path, chance: random.Random) -> None:
        self._nursery = nursery
        self._where = (url, options)
        self._max_pause_seconds = 1.2 if options else 0.4
        """Servers take longer: much must come to an end, too."""
        self._folder = folder
        self._chance = chance
        self._pids: dict[tuple[str, int], int] = {}
        self._asleep: dict[tuple[str, int], float] = {}
        self.kills = self.sleeps = 0

    def run(self, seconds: float) -> None:
        for who in PROCESSES:
            self._start(who)
        begin = time.monotonic()
        while time.monotonic() < begin + seconds or not self._is_enough():
            assert time.monotonic() < begin + seconds + MAX_WAIT_SECONDS, f"too little was done: {said_counts(self._folder)}"
            time.sleep(self._chance.uniform(0, self._max_pause_seconds))
            self._wake()
            self._replace_those_that_gave_up()
            who = self._chance.choice(PROCESSES)
            if who in self._asleep:
                continue
            if self._chance.random() < 0.5:
                self._kill(who)
                self._start(who)
                self.kills += 1
            else:
                os.kill(self._pids[who], signal.SIGSTOP)
                self._asleep[who] = time.monotonic() + self._chance.uniform(0, 2)
                self.sleeps += 1
        for who in PROCESSES:
            self._kill(who)
        self._replace_those_that_gave_up()

    def _start(self, who: tuple[str, int]) -> None:
        role, number = who
        cache = self._folder / ("cache-shared" if who in SHARE_A_CACHE else f"cache-{role}-{number}")
        job = Job(role, number, *self._where, str(cache), str(self._folder), self._chance.randrange(1 << 32))
        self._pids[who] = self._nursery.fork(job)

    def _kill(self, who: tuple[str, int]) -> None:
        pid = self._pids.pop(who)
        os.kill(pid, signal.SIGKILL)
        self._check(who, self._nursery.exit_code(pid, wait=True))

    def _wake(self) -> None:
        for who, until in list(self._asleep.items()):
            if until < time.monotonic():
                del self._asleep[who]
                os.kill(self._pids[who], signal.SIGCONT)

    def _replace_those_that_gave_up(self) -> None:
        for who, pid in list(self._pids.items()):
            code = self._nursery.exit_code(pid)
            if code is not None:
                self._check(who, code)
                self._start(who)

    def _check(self, who: tuple[str, int], code: int | None) -> None:
        said = self._folder / f"{who[0]}-{who[1]}.err"
        errors = said.read_text() if said.exists() else ""  # it was killed before it began
        assert code in (GAVE_UP, -signal.SIGKILL), f"{who} ended with {code}: {errors[-5000:]}"

    def _is_enough(self) -> bool:
        counts = said_counts(self._folder)
        done = all(counts[f"writer-{number}"].get("forgets", 0) >= ENOUGH for number in range(WRITERS))
        return done and all(counts[f"gc-{number}"].get("collected", 0) for number in range(2)) and bool(counts["reader-0"].get("read"))


def said_counts(folder: Path) -> dict[str, dict[str, int]]:
    """Process -> what it said -> how often."""
    counts: dict[str, dict[str, int]] = {}
    for role, number in PROCESSES:
        name = f"{role}-{number}"
        said = [line["what"] for line in heard(folder, name)]
        counts[name] = {what: said.count(what) for what in sorted(set(said))}
    return counts


@contextmanager
def nursery() -> Iterator[Nursery]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
    command = [sys.executable, "-m", "tests.gc.worker"]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Nursery(process.stdin, process.stdout)
        finally:
            process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0


@pytest.fixture(params=["local", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if request.param == "local":
        return str(tmp_path / "store"), {}
    server: S3Server = request.getfixturevalue("seaweedfs_server")
    return f"{server.url}/{uuid.uuid4()}", server.storage_options


@pytest.mark.slow
@pytest.mark.timeout(60 * MINUTES + 2 * MAX_WAIT_SECONDS)
def test_nothing_acknowledged_is_lost_and_no_garbage_stays(place: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, options = place
    seed = int(os.environ.get("GC_SEED", random.randrange(1 << 32)))
    print(f"seed {seed}")
    tsck.open(url, create=True, storage_options=options, cache_dir=tmp_path / "cache-shared").close()
    with nursery() as forks:
        conductor = Conductor(forks, url, options, tmp_path, random.Random(seed))
        conductor.run(60 * MINUTES)
    print(f"{conductor.kills} kills, {conductor.sleeps} sleeps: {json.dumps(said_counts(tmp_path))}")

    held = held_by_writers(tmp_path)
    with tsck.open(url, storage_options=options, cache_dir=tmp_path / "cold") as store:
        require_all(store, held)
        engine = open_engine(url, storage_options=options, cache_dir=tmp_path / "cold-too")
        needed, there = footprint(engine)
        garbage = there - needed
        for _ in range(2):
            store.gc(EVERYTHING)
        needed, there = footprint(engine)
        print(f"{len(held)} held in {needed} bytes, garbage: {garbage} bytes before, {there - needed} after two quiet runs")
        assert there - needed <= garbage / 100
        third = store.gc(EVERYTHING, dry_run=True)
        assert not any(third.deleted.values()), third
        require_all(store, held)
        engine.close()


def held_by_writers(folder: Path) -> dict[str, str]:
    """Root -> digest of what was acknowledged, and not given up since."""
    held: dict[str, str] = {}
    for number in range(WRITERS):
        for line in heard(folder, f"writer-{number}"):
            if line["what"] == "held":
                held[line["root"]] = line["digest"]
            elif line["what"] == "forgets":
                held.pop(line["root"], None)
    return held


def require_all(store: tsck.Store, held: dict[str, str]) -> None:
    for root, expected in held.items():
        assert digest(store.checkout(root)) == expected
    listed = {snapshot.root for snapshot in store.log()}
    assert listed >= set(held)
    report = store.fsck(read_data=True)
    assert report.ok, report.findings


def footprint(engine: Engine) -> tuple[int, int]:
    """Bytes of what the snapshots that are held need, straight from their parts; and of all objects that lie there."""
    engine.log.sync()
    view = engine.log.view()
    listed = list_objects(engine.backend)
    blocks: dict[tuple[Any, int], int] = {}
    objects: set[ObjectKey] = set()
    for info in view.snapshots():
        record = engine.read_record(info)
        objects.add(ObjectKey("snapshot", info.ulid))
        for rank, ulid in enumerate(record.parts):
            objects.add(ObjectKey("part", ulid))
            places = locate_blocks(engine, view, engine.read_part(record, rank))
            objects |= {ObjectKey("moved", moved) for moved in places.moved}
            for extent in places.extents:
                blocks[places.packs[extent["pack"]], int(extent["entry"])] = int(extent["stored"])
    packs = {pack for pack, _ in blocks}
    needed = sum(blocks.values()) + len(blocks) * ENTRY_DTYPE.itemsize + len(packs) * (HEADER.size + TRAILER.size)
    assert {key for key in listed if key.kind != "pack"} >= objects
    assert {key.ulid for key in listed if key.kind == "pack"} >= packs
    there = sum(info.size_bytes for folder in FOLDERS.values() for info in engine.backend.list(f"{folder}/"))
    return needed + sum(listed[key].size_bytes for key in objects), there

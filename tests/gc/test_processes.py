"""Real processes: writers, gcs and a reader on one store, killed, stopped and started again at random moments.

Nothing that was acknowledged is lost, no read is wrong, and what is left behind goes in two quiet runs of gc. ``GC_MINUTES`` makes it
longer, ``GC_SEED`` repeats the conductor's choices.
"""

import json
import os
import random
import signal
import time
import uuid
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.gc import GcOptions
from tests.effort import PATIENCE_SECONDS, effort
from tests.gc.stores import sizes
from tests.gc.worker import GAVE_UP, WRITERS, Job, digest, heard, live
from tests.servers import S3Server
from tests.session.group.pool import rank_process

MINUTES = float(os.environ.get("GC_MINUTES", effort("0.2", "0.5")))
ENOUGH = effort(2, 5)
"""Snapshots that each writer must have forgotten before the end."""
EVERYTHING = GcOptions(min_age_seconds=0, undo_window_seconds=0, max_delete=1, compact_below=1)
PROCESSES = [("writer", 0), ("writer", 1), ("writer", 2), ("writer", 3), ("gc", 0), ("gc", 1), ("reader", 0)]
SHARE_A_CACHE = {("writer", 0), ("writer", 1), ("gc", 0)}
"""As processes of one host do; each of the others is a host of its own."""


class Conductor:
    """Starts the processes, and does to them what happens to processes."""

    def __init__(self, url: str, options: dict[str, Any], folder: Path, chance: random.Random) -> None:
        self._where = (url, options)
        self._max_pause_seconds = 1.2 if options else 0.4
        """Servers take longer: much must come to an end, too."""
        self._folder = folder
        self._chance = chance
        self._processes: dict[tuple[str, int], ForkServerProcess] = {}
        self._asleep: dict[tuple[str, int], float] = {}
        self._spared: dict[tuple[str, int], int] = {}
        """Half of all processes are killed only after they got something done, however slow the machine is: how much was done before."""
        self.kills = self.sleeps = 0

    def run(self, seconds: float) -> None:
        try:
            self._run(seconds)
        finally:
            for process in self._processes.values():
                process.kill()

    def _run(self, seconds: float) -> None:
        for who in PROCESSES:
            self._start(who)
        begin = changed = time.monotonic()
        done = 0
        while time.monotonic() < begin + seconds or not self._is_enough():
            if done != (now := sum(map(self._done, PROCESSES))):
                done, changed = now, time.monotonic()
            assert time.monotonic() < changed + PATIENCE_SECONDS, f"nothing is done any more: {said_counts(self._folder)}"
            time.sleep(self._chance.uniform(0, self._max_pause_seconds))
            self._wake()
            self._replace_those_that_gave_up()
            who = self._chance.choice(PROCESSES)
            if who in self._asleep:
                continue
            if self._chance.random() < 0.5:
                if self._spared.get(who) == self._done(who):
                    continue
                self._kill(who)
                self._start(who)
                self.kills += 1
            else:
                self._signal(who, signal.SIGSTOP)
                self._asleep[who] = time.monotonic() + self._chance.uniform(0, 2)
                self.sleeps += 1
        for who in PROCESSES:
            self._kill(who)

    def _start(self, who: tuple[str, int]) -> None:
        role, number = who
        cache = self._folder / ("cache-shared" if who in SHARE_A_CACHE else f"cache-{role}-{number}")
        job = Job(role, number, *self._where, str(cache), str(self._folder), self._chance.randrange(1 << 32))
        self._processes[who] = rank_process(live, job, daemon=True)
        self._processes[who].start()
        self._spared.pop(who, None)
        if self._chance.random() < 0.5:
            self._spared[who] = self._done(who)

    def _done(self, who: tuple[str, int]) -> int:
        """How much a process and those before it have said, but for what it begins."""
        return sum(line["what"] != "begins" for line in heard(self._folder, f"{who[0]}-{who[1]}"))

    def _signal(self, who: tuple[str, int], number: signal.Signals) -> None:
        os.kill(self._processes[who].pid or 0, number)  # until it is waited for, its id is nobody else's

    def _kill(self, who: tuple[str, int]) -> None:
        process = self._processes.pop(who)
        process.kill()
        process.join(PATIENCE_SECONDS)
        self._check(who, process.exitcode)

    def _wake(self) -> None:
        for who, until in list(self._asleep.items()):
            if until < time.monotonic():
                del self._asleep[who]
                self._signal(who, signal.SIGCONT)

    def _replace_those_that_gave_up(self) -> None:
        for who, process in list(self._processes.items()):
            if process.exitcode is not None:
                self._check(who, process.exitcode)
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


@pytest.fixture(params=["local", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, dict[str, Any]]:
    if request.param == "local":
        return str(tmp_path / "store"), {}
    server: S3Server = request.getfixturevalue("seaweedfs_server")
    return f"{server.url}/{uuid.uuid4()}", server.storage_options


@pytest.mark.slow
@pytest.mark.race
@pytest.mark.timeout(60 * MINUTES + 10 * PATIENCE_SECONDS)
def test_nothing_acknowledged_is_lost_and_no_garbage_stays(place: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    url, options = place
    seed = int(os.environ.get("GC_SEED", random.randrange(1 << 32)))
    print(f"seed {seed}")
    tsck.open(url, create=True, storage_options=options, cache_dir=tmp_path / "cache-shared").close()
    conductor = Conductor(url, options, tmp_path, random.Random(seed))
    conductor.run(60 * MINUTES)
    print(f"{conductor.kills} kills, {conductor.sleeps} sleeps: {json.dumps(said_counts(tmp_path))}")

    held = held_by_writers(tmp_path)
    with tsck.open(url, storage_options=options, cache_dir=tmp_path / "cold") as store:
        require_all(store, held)
        for _ in range(2):
            store.gc(EVERYTHING)
        assert not any(store.gc(EVERYTHING, dry_run=True).deleted.values())
        require_all(store, held)
        for branch in store.branches():
            store.forget(branch)
        store.gc(EVERYTHING)
        assert sizes(store.engine.backend) == {}, "nothing is held, and nothing is left"


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

"""Eight real processes save snapshots at once: each acknowledged one is in its ref's history exactly once, and no update is lost."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import tensorstore_ck as tsck
from tests.end_to_end.committer import ref_of
from tests.servers import S3Server

pytestmark = pytest.mark.slow

WORKERS = 8
HOSTS = 3
"""Workers share this many caches, as processes of so many hosts would."""


@dataclass(frozen=True)
class Outcome:
    """What the processes said, and the store as they left it."""

    store: tsck.Store
    said: list[list[dict[str, Any]]]
    puts: int

    def of(self, mode: str) -> list[list[dict[str, Any]]]:
        return [[line for line in lines if line["mode"] == mode] for lines in self.said]


@pytest.fixture(scope="module", params=["local", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    folder = tmp_path_factory.mktemp("many-processes")
    if request.param == "local":
        url, options, puts = str(folder / "store"), {}, 6
    else:
        server: S3Server = request.getfixturevalue("seaweedfs_server")
        # A create that loses takes 1.5 s there.
        url, options, puts = f"{server.url}/{uuid.uuid4()}", server.storage_options, 1
    tsck.open(url, create=True, storage_options=options, cache_dir=folder / "cache").close()
    said = run_workers(url, options, folder, puts)
    with tsck.open(url, storage_options=options, cache_dir=folder / "cold") as store:
        yield Outcome(store, said, puts)


def run_workers(url: str, options: dict[str, Any], folder: Path, puts: int) -> list[list[dict[str, Any]]]:
    """Starts them, lets all go at once, and returns what each said."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
    workers = []
    for worker in range(WORKERS):
        command = [sys.executable, "-m", "tests.end_to_end.committer", url, json.dumps(options), str(folder / f"cache-{worker % HOSTS}")]
        command += [str(worker), str(puts)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(command, env=environment, **pipes))
    try:
        for process in workers:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise AssertionError(process.communicate()[1])
        for process in workers:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        said = []
        for process in workers:
            output, errors = process.communicate(timeout=270)
            assert process.returncode == 0, errors
            assert not errors
            said.append([json.loads(line) for line in output.splitlines()])
        return said
    finally:
        for process in workers:
            if process.poll() is None:
                process.kill()
                process.communicate()


def test_every_acknowledged_save_is_in_the_log_once(outcome: Outcome) -> None:
    entries = [line["entry"] for lines in outcome.said for line in lines]
    assert sorted(entries) == list(range(1, 3 * WORKERS * outcome.puts + 1))
    for lines in outcome.said:
        assert [line["entry"] for line in lines] == sorted(line["entry"] for line in lines)


@pytest.mark.parametrize("mode", ["shared", "any", "own"])
def test_the_history_is_what_was_acknowledged(outcome: Outcome, mode: str) -> None:
    for worker in range(WORKERS) if mode == "own" else [0]:
        lines = outcome.of(mode)[worker] if mode == "own" else [line for lines in outcome.of(mode) for line in lines]
        acknowledged = {line["entry"]: (line["root"], line["parent"]) for line in lines}
        history = outcome.store.log(ref_of(mode, worker))
        assert [(snapshot.entry, (snapshot.root, snapshot.parent)) for snapshot in history] == sorted(acknowledged.items(), reverse=True)


def test_no_update_is_lost(outcome: Outcome) -> None:
    """Each save of the shared ref, and of a worker's own, builds on the one before."""
    for ref in ("runs/shared", *(ref_of("own", worker) for worker in range(WORKERS))):
        oldest_first = outcome.store.log(ref)[::-1]
        assert [snapshot.parent for snapshot in oldest_first[1:]] == [snapshot.root for snapshot in oldest_first[:-1]]
        assert outcome.store.checkout(ref)["count"] == len(oldest_first)
        assert outcome.store.checkout(oldest_first[0].root)["count"] == 1


def test_who_asks_for_any_builds_on_what_it_had(outcome: Outcome) -> None:
    heads = {None, *(snapshot.root for snapshot in outcome.store.log("runs/any"))}
    heads |= {snapshot.root for snapshot in outcome.store.log("runs/shared")}  # a branch that is not there yet forks from what was restored
    for lines in outcome.of("any"):
        assert all(line["parent"] in heads for line in lines)
        assert all(line["conflicts"] == 0 for line in lines)


def test_losers_got_conflicts(outcome: Outcome) -> None:
    assert sum(line["conflicts"] for lines in outcome.of("shared") for line in lines) >= WORKERS - 1, "one alone can make the ref"
    assert all(line["conflicts"] == 0 for lines in outcome.of("own") for line in lines)


def test_the_store_is_sound(outcome: Outcome) -> None:
    report = outcome.store.fsck(read_data=True)
    assert report.ok, report.findings

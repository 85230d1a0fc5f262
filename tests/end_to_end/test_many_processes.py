"""Eight real processes save snapshots at once: each acknowledged one is in its ref's history exactly once, and no update is lost."""

import multiprocessing
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tensorstore_ck as tsck
from tests.effort import PATIENCE_SECONDS
from tests.servers import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.race]

WORKERS = 8
HOSTS = 3
"""Workers share this many caches, as processes of so many hosts would."""
MODES = ("shared", "any", "own")


class Saved(NamedTuple):
    """What a worker learned about one save."""

    worker: int
    mode: str
    root: str
    parent: str | None
    entry: int
    conflicts: int


def ref_of(mode: str, worker: int) -> str:
    return f"runs/{worker}" if mode == "own" else f"runs/{mode}"


def put(store: tsck.Store, mode: str, worker: int, number: int) -> Saved:
    """One save to the mode's ref. Its state counts the saves that it builds on."""
    ref = ref_of(mode, worker)
    expect: Any = tsck.ANY if mode == "any" else tsck.LAST_SEEN
    conflicts, count = 0, 0 if number == 0 else store.checkout(ref)["count"]
    while True:
        state = {"count": count + 1, "frozen": torch.arange(5000), "weights": torch.full((3000,), worker * 1000 + number)}
        try:
            found = store.put_snapshot(state, ref=ref, expect=expect)
        except tsck.ConflictError:
            conflicts += 1
            count = store.checkout(ref)["count"]
        else:
            return Saved(worker, mode, found.root, found.parent, found.entry, conflicts)


def work(place: dict[str, Any], worker: int, puts: int, barrier: Any, results: Any) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads
    with tsck.open(**place) as store:
        barrier.wait(PATIENCE_SECONDS)
        for number in range(puts):
            for mode in MODES:
                results.put(put(store, mode, worker, number))


def run_workers(place: dict[str, Any], folder: Path, puts: int) -> list[Saved]:
    """Lets all go at once; what they said, each in its order."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(WORKERS), context.Queue()
    workers = [
        context.Process(target=work, args=({**place, "cache_dir": folder / f"cache-{number % HOSTS}"}, number, puts, barrier, results))
        for number in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    said = [results.get(timeout=PATIENCE_SECONDS) for _ in range(WORKERS * puts * len(MODES))]
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0] * WORKERS
    return said


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["local", pytest.param("seaweedfs", marks=pytest.mark.s3)])
def test_every_acknowledged_save_is_in_the_log_once(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    place: dict[str, Any]
    if kind == "local":
        place, puts = {"url": str(tmp_path / "store")}, 6
    else:
        server: S3Server = request.getfixturevalue("seaweedfs_server")
        # a create that loses takes 1.5 s there
        place, puts = {"url": f"{server.url}/{uuid.uuid4()}", "storage_options": server.storage_options}, 1
    tsck.open(**place, create=True, cache_dir=tmp_path / "cache").close()
    said = run_workers(place, tmp_path, puts)
    assert sorted(one.entry for one in said) == list(range(1, len(said) + 1))
    for worker in range(WORKERS):
        entries = [one.entry for one in said if one.worker == worker]
        assert entries == sorted(entries)
    with tsck.open(**place, cache_dir=tmp_path / "cold") as store:
        histories = {ref: store.log(ref) for ref in {ref_of(one.mode, one.worker) for one in said}}
        for ref, history in histories.items():
            acknowledged = {one.entry: (one.root, one.parent) for one in said if ref_of(one.mode, one.worker) == ref}
            assert [(snap.entry, (snap.root, snap.parent)) for snap in history] == sorted(acknowledged.items(), reverse=True)
            if ref != "runs/any":
                assert [snap.parent for snap in history[:-1]] == [snap.root for snap in history[1:]], "no update is lost"
                assert store.checkout(ref)["count"] == len(history)
                assert store.checkout(history[-1].root)["count"] == 1
        # who asks for any builds on what it had; a branch that is not there yet forks from what was restored
        heads = {None, *(snap.root for ref in ("runs/any", "runs/shared") for snap in histories[ref])}
        assert {one.parent for one in said if one.mode == "any"} <= heads
        conflicts = {mode: sum(one.conflicts for one in said if one.mode == mode) for mode in MODES}
        assert conflicts["any"] == conflicts["own"] == 0
        assert conflicts["shared"] >= WORKERS - 1, "one alone can make the ref"
        report = store.fsck(read_data=True)
        assert report.ok, report.findings

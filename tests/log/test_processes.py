"""Real processes on local files: each acknowledged entry is in the log exactly once, where it was said to be."""

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event, Semaphore
from pathlib import Path
from typing import NamedTuple

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import ZERO_DIGEST, new_ulid
from tensorstore_ck.errors import ConflictError
from tensorstore_ck.log import Log, Op, RefTable
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table
from tensorstore_ck.log.follow import empty
from tests.effort import PATIENCE_SECONDS
from tests.log.scripted import UUID, dump_of, open_log, put_op

WORKERS, PUTS = 6, 12


class Emptier(NamedTuple):
    """A process that empties the cache: once for each `turns`, which it says in `done`."""

    turns: Semaphore
    done: Semaphore
    is_over: Event


def append(store: Path, cache: Path, worker: int, said: Connection, *, is_shared: bool, emptier: Emptier | None) -> None:
    """Each save goes to the worker's own branch, which nobody else moves, or to a shared one from exactly where it is."""
    table = open_lmdb_table(cache)
    log = Log(LocalBackend(str(store)), table, uuid=UUID, clock=time.time_ns, actor=f"worker-{worker}", new_id=new_ulid)
    ref = "runs/shared" if is_shared else f"runs/{worker}"
    left = [worker * 10_000 + number for number in range(PUTS)]
    while left:
        branch = log.view().branch(ref)
        expected = branch.root if branch else None
        if is_shared and random.random() < 0.3:
            expected = ZERO_DIGEST  # where the branch never is

        def build(view: RefTable) -> list[Op]:
            current = view.branch(ref)
            if (current.root if current else None) != expected:  # noqa: B023 - called at once
                raise ConflictError(f"{ref} has moved", object_id=ref)
            return [put_op(ref, left[0], step=left[0], parent=expected)]  # noqa: B023

        try:
            said.send((log.append(build).n, left[0]))
            del left[0]
            if emptier is not None:
                emptier.turns.release()
                assert emptier.done.acquire(timeout=PATIENCE_SECONDS)
        except ConflictError:
            if not is_shared:
                raise
            log.sync()
    table.close()
    said.close()


def empty_cache(store: Path, cache: Path, emptier: Emptier) -> None:
    """Empties the cache after each entry that is appended, and fills it again every other time."""
    table = open_lmdb_table(cache)
    log = Log(LocalBackend(str(store)), table, uuid=UUID, clock=time.time_ns, actor="emptier", new_id=new_ulid)
    is_filled = False
    while emptier.turns.acquire() and not emptier.is_over.is_set():
        with table.batch() as batch:
            empty(batch)
        if is_filled:
            log.sync()
        is_filled = not is_filled
        emptier.done.release()
    table.close()


@pytest.mark.race
@pytest.mark.parametrize(
    ("caches", "is_shared", "is_emptied"),
    [
        pytest.param(1, True, False, id="one host and branch"),
        pytest.param(WORKERS, False, False, id="hosts and branches"),
        pytest.param(1, False, True, id="one host whose cache is emptied", marks=pytest.mark.slow),
    ],
)
def test_processes_append(tmp_path: Path, caches: int, *, is_shared: bool, is_emptied: bool) -> None:
    workers, fork = [], multiprocessing.get_context("fork")
    (tmp_path / "cache-0").mkdir()
    emptier = Emptier(fork.Semaphore(0), fork.Semaphore(0), fork.Event()) if is_emptied else None
    emptying = fork.Process(target=empty_cache, args=(tmp_path / "store", tmp_path / "cache-0", emptier), daemon=True)
    if emptier is not None:
        emptying.start()
    for worker in range(WORKERS):
        cache = tmp_path / f"cache-{worker % caches}"
        cache.mkdir(exist_ok=True)
        here, there = multiprocessing.Pipe(duplex=False)
        process = fork.Process(
            target=append, args=(tmp_path / "store", cache, worker, there), kwargs={"is_shared": is_shared, "emptier": emptier}
        )
        process.start()
        there.close()
        workers.append((process, here))
    acknowledged: dict[int, int] = {}
    for process, here in workers:
        said: list[tuple[int, int]] = []
        while len(said) < PUTS:
            assert here.poll(PATIENCE_SECONDS)
            said.append(here.recv())
        process.join(PATIENCE_SECONDS)
        assert process.exitcode == 0
        assert said == sorted(said)
        acknowledged |= {number: n for n, number in said}
    if emptier is not None:
        emptier.is_over.set()
        emptier.turns.release()
        emptying.join(PATIENCE_SECONDS)
        assert emptying.exitcode == 0
    log = open_log(LocalBackend(str(tmp_path / "store")))
    log.sync()
    found = {op.fields["step"]: entry.n for entry in log.entries() for op in entry.ops}
    assert found == acknowledged
    assert len(found) == WORKERS * PUTS == log.sync().n
    for ref in log.view().branches():
        history = list(log.view().history(ref, newest_first=False))
        assert [info.parent for info in history] == [None, *(info.root for info in history[:-1])]
    warm = open_log(LocalBackend(str(tmp_path / "store")))
    warm.sync()
    assert dump_of(warm) == dump_of(log)

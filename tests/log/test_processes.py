"""Real processes on local files: each acknowledged entry is in the log exactly once, where it was said to be."""

import multiprocessing
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.common.ids import ZERO_DIGEST, new_ulid
from tensorstore_ck.errors import ConflictError
from tensorstore_ck.log import Log, Op, RefTable
from tensorstore_ck.log.cache.lmdb_table import open_lmdb_table
from tests.effort import PATIENCE_SECONDS
from tests.log.scripted import UUID, dump_of, open_log, put_op

WORKERS, PUTS = 6, 12


def append(store: Path, cache: Path, worker: int, is_shared: bool, said: Connection) -> None:
    """Each save goes to the worker's own branch, or to a shared one from exactly where it is."""
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
        except ConflictError:
            log.sync()
    table.close()
    said.close()


@pytest.mark.race
@pytest.mark.parametrize(("caches", "is_shared"), [(1, True), (WORKERS, False)], ids=["one host and branch", "hosts and branches"])
def test_processes_append(tmp_path: Path, caches: int, *, is_shared: bool) -> None:
    workers = []
    for worker in range(WORKERS):
        cache = tmp_path / f"cache-{worker % caches}"
        cache.mkdir(exist_ok=True)
        here, there = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context("fork").Process(target=append, args=(tmp_path / "store", cache, worker, is_shared, there))
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

"""Eight real processes on local files: each acknowledged entry is in the log exactly once, where it was said to be."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tests.log.scripted import dump_of, open_log

WORKERS, PUTS = 8, 12


@pytest.mark.parametrize("mode", ["shared", "own"])
@pytest.mark.parametrize("caches", [1, WORKERS], ids=["one-host", "eight-hosts"])
def test_eight_processes_append(tmp_path: Path, mode: str, caches: int) -> None:
    store = tmp_path / "store"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
    workers = []
    for worker in range(WORKERS):
        cache = tmp_path / f"cache-{worker % caches}"
        cache.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "tests.log.appender", str(store), str(cache), str(worker), str(PUTS), mode]
        workers.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    acknowledged: dict[int, int] = {}
    for process in workers:
        output, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        said = [tuple(map(int, line.split())) for line in output.splitlines()]
        assert [n for n, _ in said] == sorted(n for n, _ in said)
        acknowledged |= {number: n for n, number in said}
    log = open_log(LocalBackend(str(store)))
    log.sync()
    found = {op.fields["step"]: entry.n for entry in log.entries() for op in entry.ops}
    assert found == acknowledged
    assert len(found) == WORKERS * PUTS == log.sync().n
    for ref in log.view().branches():
        history = list(log.view().history(ref, newest_first=False))
        assert [info.parent for info in history] == [None, *(info.root for info in history[:-1])]
    warm = open_log(LocalBackend(str(store)))
    warm.sync()
    assert dump_of(warm) == dump_of(log)

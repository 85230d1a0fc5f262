"""The thread that says that a rank lives: over real stores, when a connection breaks, when its process forks and when it ends."""

import gc
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.errors import InvalidOptionError, SnapshotAbortedError
from tensorstore_ck.session.group.liveness import Heartbeat
from tests.effort import PATIENCE_SECONDS
from tests.session.group.pool import GROUPS, Pool
from tests.session.group.simulation import FakeStore

c10d: Any = dist
"""Its annotations lack most of what we use."""
SECONDS = PATIENCE_SECONDS
OFTEN = 0.01
DEAD_AFTER = 4.0


def count_in(value: bytes) -> int:
    """The counter of a beat, which also names the host."""
    count, _, host = value.partition(b" ")
    assert host.decode() == platform.node()[:64]
    return int(count)


def hearts() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tsck-alive"}


@pytest.mark.parametrize("kind", ["file", "tcp", "tcp without libuv"])
def test_a_counter_rises_in_each_kind_of_store(kind: str, tmp_path: Path) -> None:
    match kind:
        case "file":
            store = c10d.FileStore(str(tmp_path / "store"), 1)
        case _:
            store = c10d.TCPStore("127.0.0.1", 0, 1, True, use_libuv=kind == "tcp")
    store = c10d.PrefixStore("default_pg", store)
    others = hearts()
    heart = Heartbeat(store)
    heart("alive/0", OFTEN)
    deadline = time.monotonic() + SECONDS
    while count_in(store.get("alive/0")) < 3:
        assert time.monotonic() < deadline
    heart.close()
    heart.close()
    for thread in hearts() - others:
        thread.join(SECONDS)
        assert not thread.is_alive()


class Beaten(FakeStore):
    """Records what is set; each clone breaks after its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.set_values: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.is_there = True

    def clone(self) -> "Clone":
        if not self.is_there:
            raise RuntimeError("Connection refused")
        return Clone(self)


class Clone(FakeStore):
    def __init__(self, whole: Beaten) -> None:
        super().__init__()
        self._whole = whole
        self._is_broken = False

    def set(self, key: str, value: bytes, /) -> None:
        if self._is_broken:
            raise RuntimeError("Broken pipe")
        self._is_broken = True
        self._whole.set_values.put(value)


def test_it_goes_on_with_a_new_connection() -> None:
    store = Beaten()
    heart = Heartbeat(store)
    heart("alive/0", OFTEN)
    first, second = (count_in(store.set_values.get(timeout=SECONDS)) for _ in range(2))
    assert first < second
    store.is_there = False
    while not store.set_values.empty():
        store.set_values.get()
    store.is_there = True
    assert count_in(store.set_values.get(timeout=SECONDS)) > second
    heart.close()


def test_it_ends_with_its_owner() -> None:
    others = hearts()
    heart = Heartbeat(Beaten())
    heart("alive/0", 1000.0)
    (thread,) = hearts() - others
    del heart
    gc.collect()
    thread.join(SECONDS)
    assert not thread.is_alive()


def test_a_thread_that_is_not_to_be_had_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    heart = Heartbeat(Beaten())
    heart("alive/0", OFTEN)
    heart.close()


SCRIPT = """
import os, sys
import torch.distributed as dist
from tensorstore_ck.session.group.liveness import Heartbeat

store = dist.TCPStore("127.0.0.1", 0, 1, True)
heart = Heartbeat(store)
heart("alive/0", 0.0001)
pids = []
for _ in range(2):
    if (pid := os.fork()) == 0:
        sys.exit(0)  # ends as a process does
    pids.append(pid)
assert all(os.waitpid(pid, 0)[1] == 0 for pid in pids)
before = int(store.get("alive/0").split()[0])
while int(store.get("alive/0").split()[0]) < before + 10:
    pass
print("done")  # and ends while it beats
"""


@pytest.mark.slow
def test_forked_children_and_the_process_itself_end_as_without_it() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=SECONDS, check=False)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
    assert "Error" not in done.stderr


def test_the_time_must_be_one() -> None:
    for wrong in (0, 0.5, -1.0, float("nan")):
        with pytest.raises(InvalidOptionError, match="dead_after_seconds must be at least 1"):
            tsck.open("memory://patience", create=True, dead_after_seconds=wrong)


# --- real ranks -------------------------------------------------------------------------------------------------------

OPEN: dict[str, tsck.Store] = {}
"""In a rank's process."""


def opened(folder: str) -> tsck.Store:
    if folder not in OPEN:
        cache = f"{folder}/cache-{dist.get_rank()}"
        OPEN[folder] = tsck.open(f"{folder}/store", cache_dir=cache, dead_after_seconds=DEAD_AFTER)
    return OPEN[folder]


def put(folder: str, step: int, slow: int = -1, wakes: int = 0) -> str:
    """The root, or why there is none; rank 0 then wakes a process. A slow rank computes for longer than the patience before it saves."""
    ends = time.monotonic() + (2 * DEAD_AFTER if dist.get_rank() == slow else 0.0)
    while time.monotonic() < ends:
        torch.ones(100, 100) @ torch.ones(100, 100)
    try:
        snapshot = opened(folder).put_snapshot({"step": step}, ref="job", step=step, group=GROUPS[3], timeout_seconds=600)
    except SnapshotAbortedError as exc:
        return str(exc)
    finally:
        if wakes and dist.get_rank() == 0:
            os.kill(wakes, signal.SIGCONT)
    return snapshot.root


@pytest.mark.slow
def test_slow_ranks_are_waited_for_and_suspended_ones_are_not_and_train_on(folder: Path, pool: Pool) -> None:
    """Nothing but their silence can end the second save in time."""
    (root,) = set(pool.run(put, str(folder), 1, ranks=3))
    (root,) = set(pool.run(put, str(folder), 2, 2, ranks=3))
    assert len(root) == 64
    pid = pool.run(os.getpid, ranks=3)[2]
    os.kill(pid, signal.SIGSTOP)
    (reason,) = set(pool.run(put, str(folder), 3, -1, pid, ranks=3))
    assert f"rank 2 has not been heard of for {DEAD_AFTER:.0f} s" in reason
    (root,) = set(pool.run(put, str(folder), 4, ranks=3))
    assert len(root) == 64

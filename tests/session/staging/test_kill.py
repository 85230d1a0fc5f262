"""Real processes killed with SIGKILL at random moments of staging, uploading and publishing, over and over on one store and one disk."""

import os
import random
import select
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tests.effort import effort

KILLS = effort(4, 40)


def make_state(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"frozen": torch.arange(20_000), "weights": torch.randn(100_000, generator=generator), "step": step}


def check(state: dict[str, Any], step: int) -> None:
    expected = make_state(step)
    assert state["step"] == step
    for name in ("frozen", "weights"):
        assert torch.equal(state[name], expected[name])


def opened(folder: Path) -> tsck.Store:
    return tsck.open(folder / "store", create=True, cache_dir=folder / "cache", staging=folder / "stage")


def train(folder: Path, staged_fd: int) -> None:
    """The job: resumes where the ref is, and stages one step after another until it is killed."""
    store = opened(folder)
    store.finish_staged("job")
    step = store.checkout("job")["step"] if "job" in store.branches() else 0
    while True:
        step += 1
        store.put_snapshot_async(make_state(step), ref="job", step=step).staged.wait()
        os.write(staged_fd, step.to_bytes(8, "little"))


def run_and_kill(folder: Path, steps: int, delay_seconds: float) -> int:
    """Forks the job, kills it a while after it has said so many times that a step is staged, and returns the last one."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(folder, write_fd)
        finally:
            os._exit(1)  # reached only when the job fails by itself
    os.close(write_fd)
    said = b""
    while len(said) < 8 * steps:
        piece = os.read(read_fd, 8 * steps - len(said))
        assert piece, "the job ended by itself"
        said += piece
    select.select([], [], [], delay_seconds)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    while piece := os.read(read_fd, 1 << 16):
        said += piece
    os.close(read_fd)
    return int.from_bytes(said[-8:], "little")


@pytest.mark.race
def test_killed_again_and_again(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads, and would wait for them
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    opened(tmp_path).close()
    staged = 0
    for _ in range(KILLS):
        staged = run_and_kill(tmp_path, draw.randint(1, 3), draw.uniform(0, 0.04))
        with opened(tmp_path) as store:
            store.finish_staged("job")
            head = store.log("job")[0].step if "job" in store.branches() else 0
            assert head is not None
            assert staged <= head <= staged + 1, "what was staged is there, and at most one that nobody was told of"
            staged = head
    with opened(tmp_path) as store:
        steps = [snapshot.step for snapshot in store.log("job")]
        assert steps == list(range(staged, 0, -1))
        for step in draw.sample(steps, KILLS):
            assert step is not None
            check(store.checkout(f"job@{step}"), step)
        assert store.pins() == ()
        report = store.fsck(read_data=True)
        assert report.ok, report.findings
    names = [info.name for info in LocalBackend(str(tmp_path / "stage")).list("")]
    assert [name for name in names if not name.endswith("/users") and "/copies/" not in name] == []
    torch.set_num_threads(threads)

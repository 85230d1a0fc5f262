"""Real processes killed with SIGKILL at random moments of a save, over and over on one store, cache included."""

import os
import random
import select
import signal
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests.effort import effort

pytestmark = [pytest.mark.slow, pytest.mark.race, pytest.mark.timeout(effort(600, 3000))]

KILLS = effort(50, 500)


def make_state(step: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(step)
    return {"frozen": torch.arange(50_000), "weights": torch.randn(40_000, generator=generator), "step": step}


def check(state: dict[str, object], step: int) -> None:
    expected = make_state(step)
    assert state["step"] == step
    for name in ("frozen", "weights"):
        ours, theirs = state[name], expected[name]
        assert isinstance(ours, torch.Tensor)
        assert isinstance(theirs, torch.Tensor)
        assert torch.equal(ours, theirs)


def train(url: Path, cache: Path, acknowledged_fd: int) -> None:
    """The job: resumes where the ref is, and saves one step after another until it is killed."""
    store = tsck.open(url, cache_dir=cache)
    step = store.checkout("job")["step"] if "job" in store.branches() else 0
    while True:
        step += 1
        store.put_snapshot(make_state(step), ref="job", step=step)
        os.write(acknowledged_fd, step.to_bytes(8, "little"))


def run_and_kill(url: Path, cache: Path, delay_seconds: float) -> int | None:
    """Forks the job, kills it after the delay, and returns the last step that it said was saved."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            train(url, cache, write_fd)
        finally:
            os._exit(1)  # reached only when the job fails by itself
    os.close(write_fd)
    select.select([], [], [], delay_seconds)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the job ended by itself"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    said = b""
    while piece := os.read(read_fd, 1 << 16):
        said += piece
    os.close(read_fd)
    return int.from_bytes(said[-8:], "little") if said else None


def test_killed_again_and_again(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads, and would wait for them
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    delays = random.Random(seed)
    url, cache = tmp_path / "store", tmp_path / "cache"
    tsck.open(url, create=True, cache_dir=cache).close()
    acknowledged, longest_seconds = 0, 0.15
    for kill in range(10 * KILLS):
        if kill >= KILLS and acknowledged > 50:
            break
        said = run_and_kill(url, cache, delays.uniform(0.005, longest_seconds))
        longest_seconds *= 1.0 if said else 1.05  # a machine that is slow today gets as far
        acknowledged = said or acknowledged
        if kill % 10 == 0:
            with tsck.open(url, cache_dir=tmp_path / f"cold-{kill}") as store:
                if "job" in store.branches():
                    head = store.resolve("job").step
                    assert head is not None
                    assert acknowledged <= head <= acknowledged + 10  # each kill may hide one acknowledgement
                    check(store.checkout("job"), head)
                    acknowledged = head
                else:
                    assert acknowledged == 0
    with tsck.open(url, cache_dir=cache) as store:
        assert acknowledged > 50
        steps = [snapshot.step for snapshot in store.log("job")]
        assert steps == list(range(len(steps), 0, -1))
        for step in random.Random(seed).sample(steps, 20):
            assert step is not None
            check(store.checkout(f"job@{step}"), step)
        report = store.fsck(read_data=True)
        assert report.ok, report.findings

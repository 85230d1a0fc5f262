"""Processes on one device: forks, kills at random points, two ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import tensorstore_ck as tsck
from tests.effort import effort
from tests.gpu.kinds import clones, different, random_tensor

REF = "runs/processes"
KILLS = effort(30, 300)
CHAINS = 6


def test_a_fork_during_an_asynchronous_put(cuda: torch.device, store: tsck.Store, tmp_path: Path) -> None:
    """The child has no CUDA, and may save what is in host memory to a store that it opens; the parent's save is whole."""
    state = {"a": random_tensor(cuda, 1 << 24)}
    expected = clones(state)
    store.put_snapshot_async(state, ref=REF, step=1).wait()
    pending = store.put_snapshot_async(state, ref=REF, step=2, unchanged="ok")
    child = os.fork()
    if child == 0:
        try:
            values = np.arange(1 << 20)  # torch's own threads do not survive a fork
            with tsck.open(tmp_path / "child", create=True, cache_dir=tmp_path / "child-cache") as own:
                own.put_snapshot_async({"b": torch.from_numpy(values)}, ref=REF, step=1).wait()
                os._exit(0 if np.array_equal(own.checkout(REF)["b"].numpy(), values) else 2)
        except BaseException:  # noqa: BLE001 - the child must end here
            import traceback

            traceback.print_exc()
            os._exit(3)
    pending.wait()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert different(store.checkout(REF), expected) == []
    state["a"].add_(1)
    store.put_snapshot_async(state, ref=REF, step=3).wait()
    assert different(store.checkout(REF), clones(state)) == []


@pytest.mark.race
def test_kills_at_random_points_of_a_loop(device: torch.device, tmp_path: Path) -> None:
    """Each life restores the newest snapshot, compares its bits with those of its step, and saves every step until it is killed."""
    command = [sys.executable, "-m", "tests.gpu.killed_loops", str(tmp_path), device.type, str(CHAINS), str(KILLS // CHAINS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == KILLS
    assert found["wrong"] == []


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_two_ranks_on_one_device(device: torch.device, tmp_path: Path, is_waited_for: bool) -> None:
    command = [sys.executable, "-m", "tests.gpu.two_ranks", str(tmp_path), device.type, str(int(is_waited_for))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr

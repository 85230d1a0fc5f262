"""Processes, threads, forks, growth, removal and SIGKILL at once: no value is ever wrong, and LMDB never takes a process down."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.effort import effort

SECONDS = effort(20, 600)
PROCESSES = 3


def start(folder: Path, seed: int) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.log.cache.hammer", str(folder), str(seed), "30"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 300)
def test_nothing_takes_a_process_down(tmp_path: Path) -> None:
    draw, seed, killed, ended = random.Random(1), 0, 0, 0
    running: list[subprocess.Popen[str]] = []
    deadline = time.monotonic() + SECONDS
    while running or time.monotonic() < deadline:
        while len(running) < PROCESSES and time.monotonic() < deadline:
            seed += 1
            running.append(start(tmp_path, seed))
        process = running.pop(0)
        if draw.random() < 0.3:
            try:
                process.wait(timeout=draw.random() * 3)
            except subprocess.TimeoutExpired:
                process.kill()
        _, error = process.communicate(timeout=200)
        if process.returncode == -signal.SIGKILL:
            killed += 1
        else:
            ended += 1
            assert process.returncode == 0, error
    assert killed + ended == seed

"""A Ray of two CPUs on this host, for one test."""

import gc
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def ray_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    ray = pytest.importorskip("ray", reason="the extra ray is not installed: run `make test-apart`")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # by default workers wait for every other process of a busy machine
    root = Path(__file__).parents[3]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": str(root), "XDG_STATE_HOME": "/dev/null"}},
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        with warnings.catch_warnings():  # Ray leaves Popen objects of processes that it has ended
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()

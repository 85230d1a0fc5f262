"""Runs on a machine with a GPU only: `make test-gpu`. `GPU_TESTS_ON=cpu` tries the tests themselves where there is none."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if os.environ.get("GPU_TESTS_ON") == "cpu":
        return torch.device("cpu")
    pytest.skip("needs a GPU with CUDA")


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """For what the CPU has not: streams, graphs, device memory."""
    if device.type != "cuda":
        pytest.skip("needs a GPU with CUDA")
    return device


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as opened:
        yield opened

"""A store in a folder that ranks share, and one of one process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tests.session.group.pool import make_store


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Several wait for each other where there are more processes than cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("training")
    make_store(folder)
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        yield store

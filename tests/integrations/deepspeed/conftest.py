"""Before anything imports DeepSpeed: it would look for GPUs."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.store import Store

if importlib.util.find_spec("deepspeed") is not None:
    from tests.integrations.deepspeed import on_cpu  # noqa: F401


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty one."""
    with tsck.open(tmp_path / "store", create=True, no_sync=True, cache_dir=tmp_path / "cache") as opened:
        yield opened

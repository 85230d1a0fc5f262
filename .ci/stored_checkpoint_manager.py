"""A plugin of pytest, for torch_checkpointing's own tests: its `CheckpointManager` is the one of tensorstore_ck, over one store.

    pip install torch_checkpointing==0.1.1; pip download --no-binary :all: --no-deps torch_checkpointing==0.1.1, and unpack it
    touch tests/__init__.py tests/resharding_test_utils.py        (the sdist lacks the second, and the first)
    PYTHONPATH=<here>/.ci python -m pytest -p stored_checkpoint_manager tests/test_checkpoint_manager.py tests/test_checkpointer.py

`test_checkpointer.py` tests the saver and the loader below the manager: both are replaced by a manager, too.
"""

import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch_checkpointing.checkpoint_manager as native

import tensorstore_ck as tsck

_STORES: list[tsck.Store] = []


@pytest.fixture(autouse=True)
def store() -> Iterator[None]:
    """A store for each test."""
    with (
        tempfile.TemporaryDirectory() as folder,
        tsck.open(Path(folder) / "store", create=True, cache_dir=Path(folder) / "cache") as opened,
    ):
        _STORES.append(opened)
        yield
        _STORES.pop()


def build(config: Any) -> tsck.CheckpointManager:
    """In place of `Config.build`."""
    return tsck.CheckpointManager(config, store=_STORES[-1], ref="runs/judged")


class Saver:
    """In place of a `CheckpointSaver`."""

    def __init__(self, *, asynchronous: bool) -> None:
        self._asynchronous = asynchronous
        save = SimpleNamespace(staging_config=None) if asynchronous else SimpleNamespace()
        self.manager = build(SimpleNamespace(items={}, default=SimpleNamespace(), save=save))

    def save(self, path: str, checkpoint: Any) -> Any:
        """See torch_checkpointing."""
        future = self.manager.save(path, {key: item.value for key, item in checkpoint.get_items().items()})
        staged: Future[None] = Future()
        staged.set_result(None)
        return (staged, future) if self._asynchronous else None

    def close(self) -> None:
        """See torch_checkpointing."""
        self.manager.close()


class Loader:
    """In place of a `CheckpointLoader`."""

    def __init__(self, **_: Any) -> None:
        self.manager = build(None)

    def load(self, path: str, checkpoint: Any, default_map_location: Any = None, strict: bool = False) -> Any:
        """See torch_checkpointing."""
        into = {key: item.value for key, item in checkpoint.get_items().items()}
        checkpoint.load_state_dict(self.manager.load(path, into=into, map_location=default_map_location, strict=strict))
        return SimpleNamespace(missing_keys=[])

    def close(self) -> None:
        """See torch_checkpointing."""
        self.manager.close()


def pytest_configure() -> None:
    """Replaces the manager, and what the sdist's tests lack."""
    native.CheckpointManager.Config.build = build  # type: ignore[method-assign]
    utils: Any = type(sys)("tests.resharding_test_utils")
    utils.SimpleResharder = object
    sys.modules["tests.resharding_test_utils"] = utils


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replaces savers and loaders."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        if hasattr(module, "create_sync_checkpointer"):
            module.create_sync_checkpointer = lambda *_: Saver(asynchronous=False)
            module.create_async_checkpointer = lambda *_: Saver(asynchronous=True)
            module.CheckpointLoader = Loader

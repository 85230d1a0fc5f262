"""A plugin of pytest: puts the adapter of tensorstore_ck into the place of a trainer, before a test imports the trainer.

transformers' Trainer has a ref for each output folder. With `--with-files` it also leaves in each checkpoint folder what transformers' own
tests look for there, so that these tests judge the rest: the model as `save_model` writes it, and empty files in place of the optimizer's.
A resume reads none of them. An Accelerator has a ref for each project folder.

Each ModelCheckpoint of Lightning has a ref of its own, and `torch.load`, with which Lightning's tests open its files, reads the snapshot.
"""

import functools
import hashlib
import importlib
import inspect
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.training.state_sides import read_training

REFS = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What is judged."""
    parser.addoption("--trainer", choices=[*REPLACE], help="what the adapter replaces")
    parser.addoption("--with-files", action="store_true", help="also write the files that transformers' tests look for")


def pytest_configure(config: pytest.Config) -> None:
    """Opens the store, and replaces the trainer."""
    folder = tempfile.TemporaryDirectory(prefix="stored-trainer-")
    store = tsck.open(Path(folder.name) / "store", create=True, cache_dir=Path(folder.name) / "cache")
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(store.close)
    REPLACE[config.getoption("--trainer")](store, with_files=config.getoption("--with-files"))


def _ref_of(folder: object) -> str:
    """One for each folder; without a folder a new one."""
    return f"runs/{next(REFS) if folder is None else hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"


def _replace_transformers(store: tsck.Store, *, with_files: bool) -> None:
    transformers: Any = importlib.import_module("transformers")
    native = transformers.Trainer

    class Trainer(tsck.hf.SnapshotMixin, native):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            given = options.get("args") or (args[1] if len(args) > 1 else None)
            super().__init__(*args, store=store, ref=_ref_of("none" if given is None else given.output_dir), **options)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            folder = self._folder(self.state.global_step, trial)
            if with_files and folder.exists():
                self.save_model(str(folder), _internal_call=True)
                for name in ("optimizer.pt", "scheduler.pt"):
                    (folder / name).touch()

    # not the module imported above: transformers may put another one into its place while it loads
    sys.modules["transformers"].Trainer = Trainer  # type: ignore[attr-defined]


def _replace_accelerate(store: tsck.Store, *, with_files: bool) -> None:
    native: Any = importlib.import_module("accelerate").Accelerator
    original = native.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        tsck.accelerate.attach(self, store=store, ref=_ref_of(self.project_dir))

    native.__init__ = init


def _replace_lightning(store: tsck.Store, *, with_files: bool) -> None:
    from tensorstore_ck.integrations.lightning.lightning_state import OWN, WEIGHTS  # noqa: PLC0415
    from tensorstore_ck.integrations.lightning.pointer_files import read_pointer  # noqa: PLC0415

    callbacks: Any = importlib.import_module("lightning.pytorch.callbacks")
    native, load = callbacks.ModelCheckpoint, torch.load
    arguments = inspect.signature(native)

    class ModelCheckpoint(tsck.lightning.SnapshotMixin, native):  # type: ignore[misc]
        @functools.wraps(native.__init__)
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(store, f"runs/{next(REFS)}", **arguments.bind(*args, **options).arguments)

    def load_snapshot(file: Any, *args: Any, **options: Any) -> Any:
        path = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        pointer = None if path is None else read_pointer(path)
        if pointer is None:
            return load(file, *args, **options)
        store.drain()
        stored = read_training(store, pointer.address)
        return {WEIGHTS: stored.shared.get("model"), **stored.rank_values[OWN]["checkpoint"]}

    ModelCheckpoint.__module__, ModelCheckpoint.__qualname__ = callbacks.__name__, native.__qualname__
    connector: Any = importlib.import_module("lightning.pytorch.trainer.connectors.callback_connector")
    callbacks.ModelCheckpoint = connector.ModelCheckpoint = ModelCheckpoint  # the other one is that of a Trainer without callbacks
    torch.load = load_snapshot


REPLACE: dict[str, Callable[..., None]] = {
    "transformers": _replace_transformers,
    "accelerate": _replace_accelerate,
    "lightning": _replace_lightning,
}

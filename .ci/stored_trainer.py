"""A plugin of pytest: `transformers.Trainer` is the one of tensorstore_ck, over one store, with a ref for each output folder.

With `--with-files` it also leaves in each checkpoint folder what transformers' own tests look for there, so that these tests judge the
rest: the model as `save_model` writes it, and empty files in place of the optimizer's. A resume reads none of them.
"""

import hashlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import transformers

import tensorstore_ck as tsck

NATIVE = transformers.Trainer


def pytest_addoption(parser: pytest.Parser) -> None:
    """The two ways to run."""
    parser.addoption("--with-files", action="store_true", help="also write the files that transformers' tests look for")


def pytest_configure(config: pytest.Config) -> None:
    """Opens the store, and replaces the Trainer before a test imports it."""
    folder = tempfile.TemporaryDirectory(prefix="stored-trainer-")
    store = tsck.open(Path(folder.name) / "store", create=True, cache_dir=Path(folder.name) / "cache")
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(store.close)
    # not the module imported above: transformers may put another one into its place while it loads
    sys.modules["transformers"].Trainer = _over(store, with_files=config.getoption("--with-files"))  # type: ignore[attr-defined]


def _over(store: tsck.Store, *, with_files: bool) -> type:
    class Trainer(tsck.hf.SnapshotMixin, NATIVE):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            given = options.get("args") or (args[1] if len(args) > 1 else None)
            folder = "none" if given is None else str(given.output_dir)
            super().__init__(*args, store=store, ref=f"runs/{hashlib.sha256(folder.encode()).hexdigest()[:16]}", **options)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            folder = self._folder(self.state.global_step, trial)
            if with_files and folder.exists():
                self.save_model(str(folder), _internal_call=True)
                for name in ("optimizer.pt", "scheduler.pt"):
                    (folder / name).touch()

    return Trainer

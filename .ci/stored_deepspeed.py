"""A plugin of pytest for DeepSpeed's own tests, on CPUs: its engines save into a store next to each `save_dir`.

`make test-trainers TRAINERS=deepspeed` runs them; with `JUDGED_STOCK=1` in the environment engines stay DeepSpeed's own. An engine that
saves without a load replaces what others saved next to that folder. `ds_to_universal` exports the snapshot in place of DeepSpeed's
conversion, so that the tests of universal checkpoints judge the export. The first run compiles DeepSpeed's Adam, for some minutes.
"""

import functools
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.integrations.exporting import export_snapshot
from tests.integrations.deepspeed.on_cpu import deepspeed

REF = "runs/judged"
common: Any = importlib.import_module("unit.common")  # of DeepSpeed's tests


def pytest_configure() -> None:
    """The processes that run the tests are forked from one that has imported this module."""
    multiprocessing.set_forkserver_preload(["stored_deepspeed"])
    common.DistributedFixture.__init_subclass__ = classmethod(_make_fixture)


def _make_fixture(cls: Any) -> None:
    """A fixture of a class that DeepSpeed marks as one with private names, which pytest has no longer since 8.4."""

    @pytest.fixture(name=cls.__name__)
    def made(request: Any) -> None:
        cls()(request)

    setattr(sys.modules[cls.__module__], f"made_{cls.__name__}", made)


def _fail_as_error(run: Any) -> Any:
    """A rank whose `pytest.raises` fails raises what its pool of processes hands back; it would wait for ever for another thing."""

    @functools.wraps(run)
    def dist_run(self: Any, *args: Any, **options: Any) -> Any:
        try:
            return run(self, *args, **options)
        except pytest.fail.Exception as exc:
            raise AssertionError(str(exc)) from None

    return dist_run


def place_of(folder: object) -> str:
    """The store next to a folder."""
    return f"{os.path.abspath(str(folder))}.store"


def attached_to(engine: Any, folder: object, *, empty: bool = False) -> Any:
    """The engine, with the store of a folder. An engine that saves to several folders gets the store of each in turn.

    `empty`: without what others have saved there.
    """
    place = place_of(folder)
    if isinstance(engine, tsck.deepspeed.SnapshotMixin):
        if engine._snapshots._store.url == place:
            return engine
        engine._snapshots.finish()
        engine.__class__ = type(engine).__bases__[1]
    if empty:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(place, ignore_errors=True)
        dist.barrier()
    tsck.deepspeed.attach(engine, place, ref=REF, asynchronous=False)
    return engine


def _export(args: Any) -> None:
    """In place of `ds_to_universal`, of a folder that names a snapshot."""
    folder = os.path.dirname(args.input_folder)
    with tempfile.TemporaryDirectory(dir=folder) as made, tsck.open(place_of(folder), read_only=True) as store:
        export_snapshot(store, REF, f"{made}/out", format="deepspeed-universal")
        (made_folder,) = Path(made, "out").glob("global_step*_universal")
        made_folder.rename(args.output_folder)


def _replace() -> None:
    importlib.import_module("deepspeed.checkpoint.ds_to_universal").main = _export  # type: ignore[attr-defined]
    native = deepspeed.DeepSpeedEngine
    save, load = native.save_checkpoint, native.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self: Any, save_dir: Any, *args: Any, **options: Any) -> Any:
        if isinstance(self, tsck.deepspeed.SnapshotMixin) or not save_dir:  # of the mixin, or an error of DeepSpeed's
            return save(self, save_dir, *args, **options)
        return attached_to(self, save_dir, empty=True).save_checkpoint(save_dir, *args, **options)

    @functools.wraps(load)
    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(self, tsck.deepspeed.SnapshotMixin):
            return load(self, load_dir, tag, *args, **options)
        return attached_to(self, load_dir).load_checkpoint(load_dir, tag, *args, **options)

    native.save_checkpoint, native.load_checkpoint = save_checkpoint, load_checkpoint


# DeepSpeed's tests of August 2026 compare it, and version 0.19.8 has it no longer
if not hasattr(deepspeed.DeepSpeedEngine, "sparse_tensor_module_names"):
    deepspeed.DeepSpeedEngine.sparse_tensor_module_names = frozenset()
common.DistributedExec._dist_run = _fail_as_error(common.DistributedExec._dist_run)
if "JUDGED_STOCK" not in os.environ:
    _replace()

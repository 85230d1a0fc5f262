"""A plugin of pytest for DeepSpeed's own tests, on CPUs: its engines save into a store next to each `save_dir`.

In the folder ``tests`` of DeepSpeed's sources, with this folder and the root of this repository in PYTHONPATH, in the environment of
`make test-apart`: ``DS_ACCELERATOR=cpu LOCAL_SIZE=4 DEEPSPEED_TIMEOUT=1 python -m pytest -p stored_deepspeed unit/checkpoint/FILE``. The
first run compiles DeepSpeed's Adam. With `JUDGED_STOCK` in the environment engines stay DeepSpeed's own.
"""

import functools
import multiprocessing
import os
from typing import Any

import tensorstore_ck as tsck
from tests.integrations.deepspeed.on_cpu import deepspeed

REF = "runs/judged"


def pytest_configure() -> None:
    """The processes that run the tests are forked from one that has imported this module."""
    multiprocessing.set_forkserver_preload(["stored_deepspeed"])


def attached_to(engine: Any, folder: object) -> Any:
    """The engine, with the store of a folder. An engine that saves to several folders gets the store of each in turn."""
    place = f"{os.path.abspath(str(folder))}.store"
    if isinstance(engine, tsck.deepspeed.SnapshotMixin):
        if engine._snapshots._store.url == place:
            return engine
        engine._snapshots.finish()
        engine.__class__ = type(engine).__bases__[1]
    tsck.deepspeed.attach(engine, place, ref=REF, asynchronous=False)
    return engine


def _replace() -> None:
    native = deepspeed.DeepSpeedEngine
    save, load = native.save_checkpoint, native.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self: Any, save_dir: Any, *args: Any, **options: Any) -> Any:
        if isinstance(self, tsck.deepspeed.SnapshotMixin) or not save_dir:  # of the mixin, or an error of DeepSpeed's
            return save(self, save_dir, *args, **options)
        return attached_to(self, save_dir).save_checkpoint(save_dir, *args, **options)

    @functools.wraps(load)
    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *args: Any, **options: Any) -> Any:
        if isinstance(self, tsck.deepspeed.SnapshotMixin):
            return load(self, load_dir, tag, *args, **options)
        return attached_to(self, load_dir).load_checkpoint(load_dir, tag, *args, **options)

    native.save_checkpoint, native.load_checkpoint = save_checkpoint, load_checkpoint


# DeepSpeed's tests of August 2026 compare it, and version 0.19.8 has it no longer
if not hasattr(deepspeed.DeepSpeedEngine, "sparse_tensor_module_names"):
    deepspeed.DeepSpeedEngine.sparse_tensor_module_names = frozenset()
if "JUDGED_STOCK" not in os.environ:
    _replace()

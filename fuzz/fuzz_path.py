"""Paths below ``tsck://``, in a store with branches, steps and tags. Nothing is written, and a path is there or it is not."""

from contextlib import suppress

import atheris
from _common import fuzz

with atheris.instrument_imports(include=["tensorstore_ck"]):
    import torch

    from tensorstore_ck.backend.memory import MemoryBackend
    from tensorstore_ck.engine.opening import init_store, make_engine
    from tensorstore_ck.integrations.filesystem import SnapshotFileSystem
    from tensorstore_ck.log.cache import MemoryTable
    from tensorstore_ck.store import Store


def filesystem() -> SnapshotFileSystem:
    backend = MemoryBackend()
    store = Store(make_engine(backend, init_store(backend), MemoryTable()))
    for step in (1, 2):
        store.put_snapshot({"w": torch.ones(4)}, ref="runs/a", step=step)
    store.tag("best", "runs/a@1")
    made = SnapshotFileSystem(store="memory://", skip_instance_cache=True)
    made._engine = store.engine
    return made


FILES = filesystem()


def target(data: bytes) -> None:
    path = data.decode("utf-8", "surrogateescape")
    with suppress(OSError, ValueError):
        for found in FILES.ls(path, detail=False):
            FILES.info(str(found))
    with suppress(OSError, ValueError):
        FILES.cat_file(path, 0, 64)


if __name__ == "__main__":
    fuzz("path", target)

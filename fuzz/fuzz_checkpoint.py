"""Checkpoints, and reads of the ref table that they are loaded into."""

import atheris
from _common import fuzz_sealed

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.log import RefTable
    from tensorstore_ck.log.cache import MemoryTable
    from tensorstore_ck.log.checkpoint import decode_checkpoint, load


def read(data: bytes) -> None:
    found = decode_checkpoint(data, "a checkpoint")
    with MemoryTable().batch() as batch:
        load(batch, found)
        view = RefTable(batch)
        view.head()
        for branch in view.branches():
            list(view.history(branch))
        for tag in view.tags():
            view.tag(tag)


if __name__ == "__main__":
    fuzz_sealed("checkpoint", read)

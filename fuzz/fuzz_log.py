"""Log entries, and the fold of what they say: whatever was decoded can be folded."""

import atheris
from _common import fuzz_sealed

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.log import RefTable
    from tensorstore_ck.log.cache import MemoryTable
    from tensorstore_ck.log.checkpoint import decode_checkpoint, dump
    from tensorstore_ck.log.entry import decode_entry
    from tensorstore_ck.log.fold import fold


def read(data: bytes) -> None:
    entry = decode_entry(data, "an entry", 1)
    with MemoryTable().batch() as batch:
        fold(entry, batch)
        fold(entry, batch)
        view = RefTable(batch)
        for branch in view.branches():
            list(view.history(branch))
        dumped = dump(batch, 1, entry.hash)
        assert dumped is not None
        try:
            decode_checkpoint(dumped, "a checkpoint")
        except Exception as exc:
            raise AssertionError("a checkpoint that was written cannot be read") from exc


if __name__ == "__main__":
    fuzz_sealed("log", read)

"""Log entries with relocations and locations, and what a reader asks of them; moved objects have the other half."""

import atheris
from _common import fuzz_sealed

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.errors import CorruptObjectError
    from tensorstore_ck.format.relocation import decode_relocation
    from tensorstore_ck.log import RefTable
    from tensorstore_ck.log.cache import MemoryTable
    from tensorstore_ck.log.entry import decode_entry
    from tensorstore_ck.log.fold import fold


def read(data: bytes) -> None:
    entry = decode_entry(data, "an entry", 1)
    with MemoryTable().batch() as batch:
        fold(entry, batch)
        view = RefTable(batch)
        for pack, url in view.locations().items():
            assert view.location_of(pack) == url
        for op in entry.ops:
            moved = op.fields.get("pack")
            for relocation in view.relocations(moved) if type(moved) is bytes and len(moved) == 16 else ():
                try:
                    decode_relocation(data, "a moved object", relocation.hash)
                except CorruptObjectError:
                    continue
                raise AssertionError("an entry is no moved object")


if __name__ == "__main__":
    fuzz_sealed("log", read, corpus="places")

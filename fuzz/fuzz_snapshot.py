"""Snapshot records, and the metadata in them."""

import atheris
from _common import fuzz_sealed

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.format.record import decode_metadata, decode_record


def read(data: bytes) -> None:
    record = decode_record(data, "a record")
    assert decode_record(record.encode(), "a record").root() == record.root()
    decode_metadata(record, "a record")


if __name__ == "__main__":
    fuzz_sealed("snapshot", read)

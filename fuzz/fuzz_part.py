"""Parts, and the values in them."""

import atheris
from _common import fuzz_sealed

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.format import values
    from tensorstore_ck.format.part import decode_part, decode_values


def read(data: bytes) -> None:
    part = decode_part(data, "a part")
    again = decode_part(part.encode(), "a part")
    assert again.part_id() == part.part_id()
    for row in range(len(part.extents)):
        assert len(part.block_id(row)) == 32
    for encoded in decode_values(part, "a part"):
        values.describe(encoded)
        values.key_text(encoded)
        values.decode(encoded)
    values.msgpack_blobs(decode_values(part, "a part"), "a part")


if __name__ == "__main__":
    fuzz_sealed("part", read)

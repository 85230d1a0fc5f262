"""Every codec, with bases at hand. An input is a codec's number (1), the raw size (2), how many bases there are (1), and stored bytes."""

import random

import atheris
from _common import fuzz

with atheris.instrument_imports(include=["tensorstore_ck"]):
    from tensorstore_ck.format.codec import decode

HEAD_BYTES = 4
NOISE = random.Random(0).randbytes(1 << 17)


def target(data: bytes) -> None:
    if len(data) < HEAD_BYTES:
        return
    raw_bytes, count = int.from_bytes(data[1:3], "little"), data[3] % 4
    base_bytes = 2 * raw_bytes // max(1, count) if data[0] == 4 else raw_bytes
    bases = [memoryview(NOISE)[:base_bytes]] * count
    assert len(decode(data[0], memoryview(data)[HEAD_BYTES:], raw_bytes, "a block", bases=bases)) == raw_bytes


if __name__ == "__main__":
    fuzz("codec", target)

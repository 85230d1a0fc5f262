"""Every flipped bit and every cut is found in the ranges that have it, however an object is divided; the others pass."""

import numpy as np
import pytest

from tensorstore_ck.common.ids import new_ulid
from tensorstore_ck.engine.range_verifier import open_verifier
from tensorstore_ck.engine.write.pack_writer import BlockEncoding, PackWriter
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.format.codec import Codec, Encoded
from tensorstore_ck.format.sealed import object_name, seal

PIECES = [7, 64, 150, 1000]


def pack() -> bytes:
    """Raw and encoded blocks, of 50 to 200 bytes."""
    made = bytearray()

    class Writer:
        def append(self, data: list[bytes]) -> int:
            at = len(made)
            made.extend(b"".join(map(bytes, data)))
            return at

        def close(self) -> None:
            pass

    class Folder:
        def open_writer(self, _: str) -> Writer:
            return Writer()

    writer = PackWriter(Folder(), new_ulid, lambda _: {})  # type: ignore[arg-type]
    random = np.random.default_rng(0)
    for number in range(4):
        raw = random.bytes(50 * (number + 1))
        encoding = BlockEncoding(Encoded(Codec.ZSTD, (raw[:40],)) if number % 2 else Encoded(Codec.RAW, (raw,)))
        writer.add([raw], {0: encoding}.__getitem__)
    writer.close()
    return bytes(made)


OBJECTS = {"pack": pack(), "part": seal("part", {"rank": 3, "ids": bytes(range(200))}), "snapshot": seal("snapshot", {"step": 1})}


def damaged_pieces(kind: str, data: bytes, piece_bytes: int) -> list[int]:
    """Where the pieces begin that would not be sent: all, if header or footer are damaged."""

    def read(offset: int, target: memoryview) -> None:
        target[:] = data[offset : offset + len(target)]

    found, pieces = [], range(0, len(data), piece_bytes)
    try:
        verify = open_verifier(object_name(kind, new_ulid()), len(data), read)
    except CorruptObjectError:
        return list(pieces) or [0]
    for offset in pieces:
        try:
            verify(offset, memoryview(data)[offset : offset + piece_bytes])
        except CorruptObjectError:
            found.append(offset)
    return found


@pytest.mark.parametrize("piece_bytes", PIECES)
@pytest.mark.parametrize("kind", OBJECTS)
def test_every_bit(kind: str, piece_bytes: int) -> None:
    sound = OBJECTS[kind]
    assert damaged_pieces(kind, sound, piece_bytes) == []
    for at in range(len(sound)):
        data = bytearray(sound)
        data[at] ^= 1 << at % 8
        assert at - at % piece_bytes in damaged_pieces(kind, bytes(data), piece_bytes), at


@pytest.mark.parametrize("kind", OBJECTS)
def test_every_cut(kind: str) -> None:
    for size in range(len(OBJECTS[kind])):
        assert damaged_pieces(kind, OBJECTS[kind][:size], 150), size


def test_what_changes_while_it_is_read() -> None:
    """The bytes in memory are verified, which are sent, and not what is read later."""
    sound = OBJECTS["pack"]

    def read(offset: int, target: memoryview) -> None:
        target[:] = sound[offset : offset + len(target)]

    verify = open_verifier(object_name("pack", new_ulid()), len(sound), read)
    for at in range(len(sound)):
        sent = bytearray(sound[at : at + 100])
        sent[0] ^= 1
        with pytest.raises(CorruptObjectError):
            verify(at, memoryview(sent))

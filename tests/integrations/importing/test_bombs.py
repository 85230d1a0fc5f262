"""Pickles of a few bytes that stand for gigabytes, or take minutes: refused by what they ask for in proportion to what was read."""

import struct
from pathlib import Path

import pytest

import tensorstore_ck as tsck
from tensorstore_ck.integrations.importing import inspect_checkpoint
from tests.integrations.importing.conftest import Bring, archive

PRIME = (1 << 61) - 1


def long(value: int) -> bytes:
    data = value.to_bytes(20, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def put(number: int) -> bytes:
    return b"q" + bytes([number])


def get(number: int) -> bytes:
    return b"h" + bytes([number])


def doubled(levels: int) -> bytes:
    """A list that holds another ten times, and so on."""
    code = b"](" + b"N" * 10 + b"e" + put(0)
    for level in range(levels):
        code += b"0](" + get(level) * 10 + b"e" + put(level + 1)
    return code


def state(code: bytes) -> bytes:
    return b"\x80\x02}(X\x01\x00\x00\x00a" + code + b"u."


ALIKE = [long(PRIME * number) for number in range(1, 900)]
LIST = b"](" + b"N" * 20_000 + b"e" + put(1)
TEXT = b"X" + struct.pack("<I", 100_000) + b"x" * 100_000 + put(1)
TUPLES = b"(" + b"N" * 200 + b"t" + put(1) + b"0(" + get(1) * 200 + b"t" + put(2) + b"0(" + get(2) * 200 + b"t" + put(3) + b"0"
BOMBS = {
    "shared lists": (doubled(6), "too few for these"),
    "shared text": (TEXT + b"0](" + get(1) * 5000 + b"e", "too few for these"),
    "copies of a list": (LIST + b"0](" + (b"c__builtin__\nset\n" + get(1) + b"\x85R") * 900 + b"e", "asks for copies"),
    "copies of a text": (TEXT + b"0](" + (b"c_codecs\nencode\n" + get(1) + b"\x85R") * 900 + b"e", "asks for copies"),
    "a key of shared tuples": (TUPLES + b"}" + get(3) + b"Ns", "a key of more than"),
    "keys one by one": (b"}" + b"".join(key + b"Ns" for key in ALIKE), "same hash"),
    "keys at once": (b"}(" + b"".join(key + b"N" for key in ALIKE) + b"u", "same hash"),
    "elements": (b"\x8f(" + b"".join(ALIKE) + b"\x90", "same hash"),
    "a frozenset": (b"(" + b"".join(ALIKE) + b"\x91", "same hash"),
    "a set": (b"c__builtin__\nset\n](" + b"".join(ALIKE) + b"e\x85R", "same hash"),
    "an OrderedDict": (b"ccollections\nOrderedDict\n](" + b"".join(key + b"N\x86" for key in ALIKE) + b"e\x85R", "same hash"),
    "tuples": (b"}(" + b"".join(key + b"\x85N" for key in ALIKE) + b"u", "same hash"),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs(tmp_path: Path, kind: str) -> None:
    code, said = BOMBS[kind]
    with pytest.raises((tsck.CorruptObjectError, tsck.UnsupportedValueError), match=said):
        inspect_checkpoint(archive(tmp_path / "a.pt", state(code)))


def test_true_pickles_share_lists(bring: Bring, tmp_path: Path) -> None:
    """As parameter groups do; and keys of numbers and tuples are as they were."""
    shared = b"](" + b"N" * 2000 + b"e" + put(1) + b"0](" + get(1) * 10 + b"e"
    keys = b"}(" + b"".join(
        b"J" + struct.pack("<i", number) + b"N" + b"J" + struct.pack("<i", -number) + b"\x85N" for number in range(1, 900)
    )
    assert bring(archive(tmp_path / "a.pt", state(shared)))[0] == {"a": [[None] * 2000] * 10}
    assert len(bring(archive(tmp_path / "b.pt", state(keys + b"u")))[0]["a"]) == 2 * 899

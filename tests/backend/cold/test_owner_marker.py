"""A damaged marker is this store's, or it may be anybody's; never is a copy's taken for this store's."""

import json

import pytest

from tensorstore_ck.backend.cold.owner_marker import MARKER_NAME, FoundMarker, OwnerMarker, read_marker
from tensorstore_ck.backend.memory import MemoryBackend

OWN = OwnerMarker("0f1e350d-b1f8-49e6-b875-4adc7175e5c6", "/data/store")
COPY = OWN._replace(url="/data/stork")
OF_EARLIER_BUILDS = json.dumps(OWN._asdict(), indent=1).encode() + b"\n"


def found(data: bytes) -> FoundMarker | None:
    backend = MemoryBackend()
    backend.put(MARKER_NAME, data)
    return read_marker(backend, OWN)


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 4
    return bytes(changed)


def test_sound() -> None:
    assert read_marker(MemoryBackend(), OWN) is None
    assert found(OWN.encode()) == found(OF_EARLIER_BUILDS) == FoundMarker(OWN, is_damaged=False)
    for other in (COPY, OWN._replace(store="11111111-b1f8-49e6-b875-222222222222")):
        assert found(other.encode()) == FoundMarker(other, is_damaged=False)


def test_every_bit() -> None:
    for at in range(len(OWN.encode())):
        said = found(flipped(OWN.encode(), at))
        assert said is not None
        assert said.owner == OWN, at


def test_every_bit_of_an_earlier_build() -> None:
    """The UUID can be recognized, and the URL not."""
    start = OF_EARLIER_BUILDS.index(OWN.store.encode())
    for at in range(len(OF_EARLIER_BUILDS)):
        said = found(flipped(OF_EARLIER_BUILDS, at))
        assert said is not None
        if start <= at < start + len(OWN.store):
            assert said == FoundMarker(OWN, is_damaged=True), at
        assert said.owner in (OWN, None) or said.owner.url != OWN.url, at


def test_every_bit_of_a_copy() -> None:
    for at in range(len(COPY.encode())):
        said = found(flipped(COPY.encode(), at))
        assert said is not None
        assert said.owner != OWN, at


@pytest.mark.parametrize("mark", [OWN.encode(), COPY.encode()])
def test_every_cut(mark: bytes) -> None:
    for size in range(len(mark) - 1):
        said = found(mark[:size])
        assert said is not None
        assert said.is_damaged
        assert said.owner == (OWN if mark == OWN.encode() and json.dumps(OWN.url).encode() in mark[:size] else None)

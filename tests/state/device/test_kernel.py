"""The kernel's ids are BLAKE3's, for every shape of its tree. Here the CPU runs it; `tests/gpu/test_ids.py` runs it on a GPU."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tensorstore_ck.common.ids import block_id
from tensorstore_ck.state.device.kernel import GROUP_BYTES, Ids, Numbers, require_known_ids
from tests.effort import effort
from tests.state.device.host_kernel import HostHasher

CHUNK = 1024
STEP = 64
BORDERS = [STEP, CHUNK, 2 * CHUNK, 3 * CHUNK, 7 * CHUNK, 64 * CHUNK, *(count * GROUP_BYTES for count in (1, 2, 3, 4, 5, 7, 8))]
SIZES = sorted({1, *(border + more for border in BORDERS for more in (-1, 0, 1, STEP, CHUNK, -CHUNK) if border + more > 0)})


def hashed(data: bytes, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
    memory = np.frombuffer(data, np.uint8)
    starts, sizes = np.array(ranges, np.int64).T
    return [each.tobytes() for each in HostHasher().hash(starts + memory.ctypes.data, sizes)]


def test_sizes_around_each_border_of_the_tree() -> None:
    data = random.Random(1).randbytes(max(SIZES) + 64)
    ranges = [(number % 19, size) for number, size in enumerate(SIZES)]
    assert hashed(data, ranges) == [block_id(data[start : start + size]) for start, size in ranges]


def test_every_number_of_chunks_of_a_group_and_of_groups() -> None:
    data = random.Random(2).randbytes(40 * GROUP_BYTES)
    sizes = [chunks * CHUNK - 5 for chunks in range(1, 130)] + [groups * GROUP_BYTES - 77 for groups in range(2, effort(18, 41))]
    assert hashed(data, [(0, size) for size in sizes]) == [block_id(data[:size]) for size in sizes]


def test_known_ids_are_right() -> None:
    require_known_ids(HostHasher(), torch.device("cpu"))


@pytest.mark.parametrize("wrong", range(27))
def test_a_wrong_id_is_noticed(wrong: int) -> None:
    class Wrong(HostHasher):
        def hash(self, addresses: Numbers, sizes_bytes: Numbers) -> Ids:
            ids = super().hash(addresses, sizes_bytes)
            ids[wrong, 31] ^= 1
            return ids

    with pytest.raises(RuntimeError, match="wrong id"):
        require_known_ids(Wrong(), torch.device("cpu"))

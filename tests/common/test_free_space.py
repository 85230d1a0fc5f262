"""What must stay free, and what is said when it would not; sizes as people write them."""

import errno
import os
from pathlib import Path

import pytest

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.common.free_space import MinFree, Space, require_free_space, writing_to
from tensorstore_ck.common.units import parse_bytes
from tensorstore_ck.errors import InvalidOptionError, NoSpaceError, PermissionDeniedError, StoreError

GIB = 1 << 30


class Disk:
    url = "/ckpt"

    def __init__(self, free_bytes: int, total_bytes: int = 100 * GIB) -> None:
        self._space = Space(free_bytes, total_bytes)

    def space(self) -> Space:
        return self._space


def test_the_message_has_all_sizes_and_what_to_do() -> None:
    with pytest.raises(NoSpaceError) as refused:
        require_free_space(Disk(12 * GIB), MinFree.parse("5%"), 10 * GIB, "step 1000 of runs/gpt")
    assert str(refused.value) == (
        "step 1000 of runs/gpt needs 10.0 GiB, and there is too little free space at /ckpt: 12.0 GiB of 100.0 GiB are free, "
        "and 5.0 GiB must stay free (min_free=5%); free space there (`tsck usage -s /ckpt` shows what gc can free now, and what later), "
        "or use another location, or pass a smaller min_free= to tsck.open(...)"
    )
    assert refused.value.object_id == "/ckpt"
    with pytest.raises(NoSpaceError) as refused:
        require_free_space(Disk(GIB), MinFree.parse("2GiB"), 0, "the store")
    assert str(refused.value).startswith(
        "the store has too little free space at /ckpt: 1.0 GiB of 100.0 GiB are free, and 2.0 GiB must stay free (min_free=2.0 GiB); "
    )
    with pytest.raises(NoSpaceError) as refused:
        require_free_space(Disk(GIB), MinFree(), 2 * GIB, "a put")
    assert "min_free" not in str(refused.value)


def test_what_must_stay_free_is_a_part_or_a_size() -> None:
    kept: dict[object, int] = {
        "5%": 5 * GIB,
        " 0.5 % ": GIB // 2,
        "50GB": 50 * 10**9,
        "1.5GiB": GIB * 3 // 2,
        4096: 4096,
        0: 0,
        "0": 0,
        "0%": 0,
    }
    for value, kept_bytes in kept.items():
        assert MinFree.parse(value).of(100 * GIB) == kept_bytes
    for wrong in ("100%", "-1%", "5 percent", "", "much", -1, 0.05, True, None):
        with pytest.raises(InvalidOptionError, match=r"min_free must be.*'5%'") as refused:
            MinFree.parse(wrong)
        assert repr(wrong) in str(refused.value)
    sizes: dict[object, int] = {"12": 12, "500k": 500_000, "10 GB": 10**10, "2TiB": 2 << 40, "0.5KiB": 512, 7: 7, "1pb": 10**15}
    assert {text: parse_bytes(text, "size") for text in sizes} == sizes
    for wrong in ("fast", "5XB", "1e9", "-5MB", "5MB/s", -1, 1.5, False):
        with pytest.raises(InvalidOptionError, match="size must be a size like 500MB"):
            parse_bytes(wrong, "size")


def test_exactly_enough_is_enough_in_a_folder_too(tmp_path: Path) -> None:
    min_free = MinFree.parse("5%")
    require_free_space(Disk(15 * GIB), min_free, 10 * GIB, "a put")
    with pytest.raises(NoSpaceError):
        require_free_space(Disk(15 * GIB - 1), min_free, 10 * GIB, "a put")
    require_free_space(MemoryBackend(), MinFree.parse("99%"), 1 << 60, "a put")  # it does not report its space
    place = LocalBackend(str(tmp_path / "not" / "there"))
    require_free_space(place, MinFree(), 0, "a put")
    with pytest.raises(NoSpaceError, match=r"1\.0 EiB, and there is too little free space"):
        require_free_space(place, MinFree(), 1 << 60, "a put")


def test_what_a_folder_refuses() -> None:
    refused = dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), PermissionDeniedError)
    full = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), NoSpaceError)
    errors: dict[int, type[StoreError]] = {**refused, **full, errno.EIO: InvalidOptionError}
    for code, error in errors.items():
        message = f"the staging folder /stage cannot be written to: {os.strerror(code)}"
        with pytest.raises(error, match=message), writing_to("/stage", "the staging folder"):
            raise OSError(code, os.strerror(code))

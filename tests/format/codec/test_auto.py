"""`auto` encodes nothing until saves have shown a store so slow that saves and restores gain; then it is `fast`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.staging import Uploader
from tensorstore_ck.backend.store_backend import throttled
from tensorstore_ck.common.rate_limit import RateLimit
from tensorstore_ck.common.save_progress import SaveMeter
from tensorstore_ck.format.codec import CodecPolicy, codec_policy
from tests.gc.stores import open_store, same, stay_in_one_thread

PUT = 1 << 30
SLOW, FAST = 100.0, 20.0
HASH_SECONDS = 0.00025
"""For each look at the clock, of which there is one for each tensor."""
TENSOR_BYTES = 640 << 10


class Time:
    """Goes on by `HASH_SECONDS` when it is looked at, and by what somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += HASH_SECONDS
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    """The clock of the meters of saves, each of which stays in one thread."""
    time = Time()
    monkeypatch.setattr(codec_policy, "JUDGED_BYTES", 3 * TENSOR_BYTES)
    monkeypatch.setattr(SaveMeter.__init__, "__defaults__", (time, lambda: None))
    stay_in_one_thread(monkeypatch)
    return time


def weights(seed: int, size_bytes: int = TENSOR_BYTES) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(size_bytes // 4, generator=generator) * 0.02 for number in range(4)}


def open_throttled(time: Time, rate: float, *, is_local: bool = False) -> tsck.Store:
    backend = MemoryBackend()
    backend.is_local = is_local
    store = open_store(backend)
    store.engine.backend = throttled(store.engine.backend, writes=RateLimit(rate, clock=lambda: time.now), sleep=time.sleep)
    return store


def codecs_of(store: tsck.Store, puts: int, **options: Any) -> list[set[str]]:
    """The codecs of each of so many snapshots, which come back as they were saved."""
    found = []
    for seed in range(puts):
        state = weights(seed)
        store.put_snapshot(state, ref="run", **options)
        found.append({codec for group in store.show("run").groups for codec in group.codecs})
        assert same(store.checkout("run"), state)
    return found


def test_a_slow_store_gets_fewer_bytes_from_the_second_save_on_that_was_not_small(time: Time) -> None:
    with open_throttled(time, 20e6) as store:
        assert codecs_of(store, 3) == [{"raw"}, {"planes"}, {"planes"}]
        first, *later = reversed(store.log("run"))
        assert all(snapshot.new_bytes < 0.9 * first.new_bytes for snapshot in later)
    with open_throttled(time, 20e6) as store:
        for seed in range(3):
            store.put_snapshot(weights(seed, TENSOR_BYTES // 2), ref="run")
        assert {codec for group in store.show("run").groups for codec in group.codecs} == {"raw"}


@pytest.mark.parametrize(
    ("rate", "is_local", "limit"),
    [(500e6, False, None), (20e6, True, None), (20e6, False, 20e6)],
    ids=["fast", "a file system", "limited"],
)
def test_a_store_that_is_not_known_to_be_slow_gets_blocks_as_they_are(time: Time, rate: float, is_local: bool, limit: float | None) -> None:
    """A file system never is, and a limit that the user set says nothing of the store."""
    with open_throttled(time, rate, is_local=is_local) as store:
        store.engine.writes = RateLimit(limit)
        assert codecs_of(store, 3) == [{"raw"}] * 3


def test_a_save_that_a_limit_slowed_does_not_count_and_the_next_one_does(time: Time) -> None:
    with open_throttled(time, 20e6) as store:
        store.engine.writes.waits += 1
        assert codecs_of(store, 3) == [{"raw"}, {"raw"}, {"planes"}]


def test_who_asks_for_fewer_bytes_gets_them_at_once(time: Time) -> None:
    wanted: list[tuple[dict[str, Any], str]] = [({"codec": "fast"}, "planes"), ({"codec": "small"}, "planes"), ({"delta": True}, "planes")]
    for options, codec in (*wanted, ({"delta": False}, "raw")):
        with open_throttled(time, 500e6, is_local=True) as store:
            assert codecs_of(store, 1, **options) == [{codec}]


def test_differences_of_one_branch() -> None:
    codecs = CodecPolicy("auto", {"runs/rl*": 16, "*": None})
    assert codecs.coding("runs/rl") == ("fast", 16)
    assert codecs.coding("runs/rl", delta=False) == ("raw", 0)
    assert codecs.coding("runs/gpt") == ("raw", 0)
    with pytest.raises(tsck.errors.InvalidOptionError, match="delta must be"):
        CodecPolicy("auto", {"*": "yes"})  # type: ignore[dict-item]


def test_one_slow_save_does_not_outweigh_fast_ones() -> None:
    raw: tuple[list[float], ...] = ([], [FAST, SLOW], [SLOW, SLOW, FAST], [FAST, SLOW, SLOW])
    for mode, histories in (("raw", raw), ("fast", ([SLOW], [FAST, SLOW, SLOW, SLOW]))):
        for paces in histories:
            codecs = CodecPolicy()
            for pace in paces:
                codecs.note_written(PUT, pace)
            assert codecs.coding("run").mode == mode


def test_behind_a_staging_disk_blocks_stay_as_they_are(time: Time, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = Uploader.upload

    def upload_slowly(uploader: Uploader, *args: Any, **options: Any) -> None:
        time.sleep(10)
        upload(uploader, *args, **options)

    monkeypatch.setattr(Uploader, "upload", upload_slowly)
    monkeypatch.setattr(LocalBackend, "is_local", False)
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", staging=tmp_path / "stage") as store:
        assert codecs_of(store, 2) == [{"raw"}] * 2

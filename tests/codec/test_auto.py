"""`auto`: as much encoding as a store is slow, which is told beside hashing."""

from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.codec import CodecChoice

PUT = 1 << 30
LITTLE = 1 << 20


@pytest.mark.parametrize(
    ("pace", "mode"), [(1, "raw"), (3.9, "raw"), (4.1, "light"), (12, "light"), (20, "fast"), (70, "fast"), (99, "small")]
)
def test_it_encodes_what_is_worth_it(pace: float, mode: str) -> None:
    codecs = CodecChoice()
    assert codecs.coding("run").mode == "light"
    codecs.note_written(PUT, pace)
    assert codecs.coding("run").mode == mode
    assert codecs.coding("run", "raw").mode == "raw"


def test_it_forgets_and_does_not_listen_to_little() -> None:
    codecs = CodecChoice()
    codecs.note_written(PUT, 1)
    codecs.note_written(LITTLE, 100)
    assert codecs.coding("run").mode == "raw"
    codecs.note_written(PUT, 100)
    assert codecs.coding("run").mode == "fast"
    for _ in range(6):
        codecs.note_written(PUT, 1)
    assert codecs.coding("run").mode == "raw"


def test_a_slow_store_gets_strong_codecs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorstore_ck.codec.choice.TELLING_BYTES", LITTLE)
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", max_bytes_per_second=10_000_000) as store:
        first = store.put_snapshot(weights(0), ref="run")
        second = store.put_snapshot(weights(1), ref="run")
        assert second.new_bytes < first.new_bytes
        assert {codec for group in store.show("run").groups for codec in group.codecs} == {"planes"}


def weights(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {f"w{number}": torch.randn(50_000, generator=generator) * 0.02 for number in range(8)}

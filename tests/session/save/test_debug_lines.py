"""The debug lines of a save: which ref and step, what it continues, what is new, what it publishes."""

import logging
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck


def test_a_save_says_what_it_decides(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = {"frozen": torch.randn(20_000), "trained": torch.randn(20_000)}
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", state_dir=tmp_path / "state") as store:
        first = store.put_snapshot(state, ref="job", step=1)
        state["trained"] += 1
        with caplog.at_level(logging.DEBUG, "tensorstore_ck"):
            second = store.put_snapshot(state, ref="job", step=2)
    lines = [f"{record.name}: {record.getMessage()}" for record in caplog.records]

    def one(start: str) -> str:
        (line,) = (line for line in lines if line.startswith(start))
        return line

    begun = one("tensorstore_ck.session: save job@2: ")
    assert f"continues {first.root}, moves the ref from {first.root}" in begun
    assert f"job@1, root {first.root}, have blocks to share" in one("tensorstore_ck.engine: 1 parts of ")
    assert "of rank 0: 1 of 3 blocks are new" in one("tensorstore_ck.engine: part parts/")
    assert "tensors may differ" in one("tensorstore_ck.engine: compared with the save before: ")
    assert second.id in one(f"tensorstore_ck.engine: publish job@2, root {second.root}, as snapshots/")
    assert one("tensorstore_ck.log: entry 2 (put): created")

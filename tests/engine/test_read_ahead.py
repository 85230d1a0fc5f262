"""What a restore tells its backend before it reads, and what a folder makes of it."""

import os
from pathlib import Path

import pytest
import torch

from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.backend.throttled import throttled_to
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.engine.read import block_reader
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store

KIB = 1 << 10


class Told(MemoryBackend):
    """Notes the ranges of packs that it is told of, and compares reads with them."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, int, int]] = []
        self.untold: list[tuple[str, int, int]] = []
        self.read_bytes = self.most_ahead_bytes = 0

    def read_ahead(self, name: str, offset: int, size: int) -> None:
        self.told.append((name, offset, offset + size))
        self.most_ahead_bytes = max(self.most_ahead_bytes, sum(stop - start for _, start, stop in self.told) - self.read_bytes)

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        super().read_into(name, offset, target)
        self.read_bytes += len(target)
        stop = offset + len(target)
        if name.startswith("packs/") and not any(name == pack and first <= offset and stop <= last for pack, first, last in self.told):
            self.untold.append((name, offset, stop))


def test_a_restore_tells_of_each_range_before_it_is_read_and_not_of_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_reader, "MERGE_BYTES", 16 * KIB)
    monkeypatch.setattr(block_reader, "RUN_BYTES", 16 * KIB)
    monkeypatch.setattr(block_reader, "AHEAD_BYTES", 128 * KIB)
    monkeypatch.setattr(block_reader, "cpu_threads", lambda: 1)
    backend = Told()
    state = {f"{number:03}": torch.rand(4 * KIB) for number in range(64)}
    with Store(make_engine(backend, init_store(backend), MemoryTable())) as store:
        store.put_snapshot(state, ref="job")
        backend.told, backend.untold, backend.read_bytes, backend.most_ahead_bytes = [], [], 0, 0
        found = store.checkout("job")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert backend.untold == []
    assert sum(stop - start for _, start, stop in backend.told) == backend.read_bytes
    assert backend.most_ahead_bytes <= (128 + 4 * 16) * KIB  # and what three threads are reading
    assert max(stop - start for _, start, stop in backend.told) >= 64 * KIB


def test_a_folder_asks_the_kernel_for_the_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *range_and_advice: asked.append((os.readlink(f"/proc/self/fd/{fd}"), *range_and_advice))
    )
    backend = LocalBackend(str(tmp_path / "store"))
    backend.put("packs/one", b"123456")
    backend.read_ahead("packs/one", 2, 3)
    throttled_to(backend, "1MB/s").read_ahead("packs/one", 2, 3)  # would read faster than the limit
    backend.read_ahead("packs/missing", 2, 3)  # the read reports it
    assert asked == [(str(tmp_path / "store/packs/one"), 2, 3, os.POSIX_FADV_WILLNEED)]

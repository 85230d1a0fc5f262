"""How much of a remote store one request reads: enough that a prefix of S3 serves thousands of ranks, and little enough for all threads."""

from typing import Final

import pytest
import torch

from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.engine.read import block_reader
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store

KIB: Final = 1 << 10
TENSOR_BYTES: Final = 8 * KIB


class RemoteBackend(MemoryBackend):
    """Notes how much each request reads of a pack."""

    is_local = False

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def read_into(self, name: str, offset: int, target: memoryview) -> None:
        if name.startswith("packs/"):
            self.sizes.append(len(target))
        super().read_into(name, offset, target)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> RemoteBackend:
    """Reads 16 KiB at once, and 64 where there is enough to read."""
    monkeypatch.setattr(block_reader, "MERGE_BYTES", 16 * KIB)
    monkeypatch.setattr(block_reader, "RUN_BYTES", 64 * KIB)
    return RemoteBackend()


@pytest.mark.parametrize(("tensors", "read_bytes"), [(32, 16 * KIB), (512, 64 * KIB)], ids=["small", "large"])
def test_a_large_restore_reads_more_at_once(backend: RemoteBackend, tensors: int, read_bytes: int) -> None:
    state = {f"{number:03}": torch.rand(TENSOR_BYTES // 4) for number in range(tensors)}
    with Store(make_engine(backend, init_store(backend), MemoryTable())) as store:
        store.put_snapshot(state, ref="job")
        backend.sizes.clear()
        found = store.checkout("job")
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    whole = [size for size in backend.sizes if size == read_bytes]
    assert max(backend.sizes) == read_bytes
    assert len(whole) * read_bytes >= 0.9 * tensors * TENSOR_BYTES

"""How much one read takes: of a remote store enough that a prefix of S3 serves thousands of ranks, and little enough for all threads; of a
local one a block, which is hashed while it is in the core's cache. And that a read costs no more than that.
"""

from pathlib import Path
from typing import Final

import pytest
import torch
import torch.distributed as dist

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.backend.memory import MemoryBackend
from tensorstore_ck.engine.opening import init_store, make_engine
from tensorstore_ck.engine.read import block_reader
from tensorstore_ck.format.pack import HEADER
from tensorstore_ck.log import Log
from tensorstore_ck.log.cache import MemoryTable
from tensorstore_ck.store import Store
from tests.group_of_one import group_of_one
from tests.session.group.pool import make_store

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


def test_a_local_restore_reads_a_block_at_a_time_and_asks_the_log_for_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    block_bytes, reads, views = 64 * KIB, list[int](), list[Log]()
    read_into, view = LocalBackend.read_into, Log.view

    def noted_read(backend: LocalBackend, name: str, offset: int, target: memoryview) -> None:
        reads.append(len(target))
        read_into(backend, name, offset, target)

    def noted_view(log: Log) -> object:
        views.append(log)
        return view(log)

    monkeypatch.setattr(block_reader, "DIRECT_BYTES", 1)
    monkeypatch.setattr(LocalBackend, "read_into", noted_read)
    monkeypatch.setattr(Log, "view", noted_view)
    make_store(tmp_path, block_bytes=block_bytes)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as store:
        for ref, blocks in (("small", 2), ("large", 50)):
            state = {"w": torch.rand(blocks * block_bytes // 4)}
            store.put_snapshot(state, ref=ref, codec="raw")
            reads.clear()
            views.clear()
            assert torch.equal(store.checkout(ref, into={"w": torch.zeros_like(state["w"])})["w"], state["w"])
            assert reads.count(block_bytes) == blocks
            assert len(views) <= 5, "however many blocks there are"


def test_tensors_lie_first_in_a_pack(tmp_path: Path) -> None:
    """So their addresses in the file agree with those in memory modulo 64, whatever the size of the layout: Linux copies faster then."""
    state = {f"a name of 26 characters {number}": torch.rand(2000) for number in range(3)}
    with tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(state, ref="job", codec="raw")
    (pack,) = (path for path in (tmp_path / "store" / "packs").rglob("*") if path.is_file())
    stored = pack.read_bytes()
    assert sorted(stored.index(tensor.numpy().tobytes()) for tensor in state.values()) == [HEADER.size + 8000 * at for at in range(3)]


def test_what_a_rank_has_of_a_flattened_tensor_is_read_straight_into_its_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Smaller blocks are fetched together, up to `DIRECT_BYTES`."""
    stored, small, reads = torch.rand(1 << 19), torch.rand(32, 1 << 15), dict[int, int]()
    read_into = LocalBackend.read_into

    def noted_read(backend: LocalBackend, name: str, offset: int, target: memoryview) -> None:
        address = torch.frombuffer(target, dtype=torch.uint8).data_ptr()
        reads[address] = max(reads.get(address, 0), len(target))
        read_into(backend, name, offset, target)

    def state(flat: torch.Tensor, rows: torch.Tensor) -> dict[str, object]:
        return {"flat": tsck.FlatShard(flat, (1 << 9, 1 << 10), 0), **{f"{number:02}": row for number, row in enumerate(rows)}}

    with group_of_one(), tsck.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        store.put_snapshot(state(stored, small), ref="job", group=dist.group.WORLD, codec="raw")
        monkeypatch.setattr(LocalBackend, "read_into", noted_read)
        flat, rows = torch.zeros_like(stored), torch.zeros_like(small)
        store.checkout("job", into=state(flat, rows), group=dist.group.WORLD)
    assert torch.equal(flat, stored)
    assert torch.equal(rows, small)
    assert reads.pop(flat.data_ptr()) == flat.nbytes
    assert max(reads.values()) == block_reader.DIRECT_BYTES

"""Restores into tensors on a device: blocks that lie side by side are read together, through windows. Here the CPU is the device."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.backend.local import LocalBackend
from tensorstore_ck.engine.read import block_reader
from tensorstore_ck.errors import DamageError
from tensorstore_ck.format.codec import CodecName
from tensorstore_ck.state import byte_sources
from tensorstore_ck.state.byte_sources import CopyTarget
from tests.session.group.pool import make_store

REF = "runs/restore"
BLOCK_BYTES = 64 << 10
RUN_BLOCKS = 8


class Device:
    """Counts what comes."""

    def __init__(self) -> None:
        self.windows: list[memoryview] = []
        self.reads: list[int] = []
        self.writes: list[int] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Each tensor is on it; windows have room for a few blocks."""
    found = Device()
    write, read_into = CopyTarget.write, LocalBackend.read_into

    def window(_: CopyTarget, size_bytes: int) -> memoryview:
        found.windows.append(memoryview(bytearray(size_bytes)))
        return found.windows[-1]

    def counted_write(target: CopyTarget, start: int, data: memoryview) -> None:
        if any(data.obj is each.obj for each in found.windows):
            found.writes.append(len(data))
        write(target, start, data)

    def counted_read(backend: LocalBackend, name: str, offset: int, target: memoryview) -> None:
        found.reads.append(len(target))
        read_into(backend, name, offset, target)

    monkeypatch.setattr(byte_sources, "is_dense", lambda tensor: False)
    monkeypatch.setattr(CopyTarget, "window", window)
    monkeypatch.setattr(CopyTarget, "write", counted_write)
    monkeypatch.setattr(LocalBackend, "read_into", counted_read)
    monkeypatch.setattr(block_reader, "DIRECT_BYTES", 1)
    monkeypatch.setattr(block_reader, "RUN_BYTES", RUN_BLOCKS * BLOCK_BYTES)
    monkeypatch.setattr(block_reader, "RUNS_A_THREAD", 0.1)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    make_store(tmp_path, block_bytes=BLOCK_BYTES)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as opened:
        yield opened


def make_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "large": torch.randn(700_000),
        "other": torch.randn(3 * 50_000, dtype=torch.float64),
        "strided": torch.randn(300, 400).t(),
        "half": torch.randn(400_000).bfloat16(),
        "small": torch.arange(7),
    }


def zeros(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("codec", ["raw", "auto"])
def test_every_byte_comes_through_a_window(device: Device, store: tsck.Store, codec: CodecName) -> None:
    state = make_state()
    store.put_snapshot(state, ref=REF, step=1, codec=codec)
    device.reads.clear()
    found = zeros(state)
    store.checkout(REF, into=found)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert sum(device.writes) >= sum(tensor.nbytes for tensor in state.values()) - 1000


def test_neighbours_are_read_and_copied_together(device: Device, store: tsck.Store) -> None:
    state = {"large": torch.randn(4_000_000)}
    store.put_snapshot(state, ref=REF, step=1, codec="raw")
    device.reads.clear()
    store.checkout(REF, into=zeros(state))
    blocks = state["large"].nbytes // BLOCK_BYTES
    assert max(device.reads) <= RUN_BLOCKS * BLOCK_BYTES
    assert len(device.writes) <= 2 * blocks // RUN_BLOCKS


@pytest.mark.parametrize("block", [0, 3, 7])
def test_a_damaged_block_of_a_run_is_named_and_delivered_to_nobody(device: Device, store: tsck.Store, tmp_path: Path, block: int) -> None:
    state = {"large": torch.ones(RUN_BLOCKS * BLOCK_BYTES // 4) * torch.arange(RUN_BLOCKS).repeat_interleave(BLOCK_BYTES // 4)}
    store.put_snapshot(state, ref=REF, step=1, codec="raw")
    (pack,) = [path for path in (tmp_path / "store").rglob("packs/**/*") if path.stat().st_size > BLOCK_BYTES]
    data = bytearray(pack.read_bytes())
    at = data.index(state["large"][block * BLOCK_BYTES // 4 : (block + 1) * BLOCK_BYTES // 4].numpy().tobytes())
    data[at + 100] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    found = {"large": torch.full_like(state["large"], -1)}
    with pytest.raises(DamageError, match="does not match its hash"):
        store.checkout(REF, into=found)
    assert found["large"][block * BLOCK_BYTES // 4 + 25] == -1

"""Saves of tensors on a device, by ids that the device computes. Here it is the CPU, which runs the kernel's C."""

import random
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorstore_ck as tsck
from tensorstore_ck.errors import CaptureChangedError
from tensorstore_ck.state import byte_sources
from tensorstore_ck.state.device.device_blocks import DeviceBlocks
from tensorstore_ck.state.device.kernel import Ids, Numbers
from tensorstore_ck.state.tensor_table import TensorTable
from tests.effort import effort
from tests.session.group.pool import make_store
from tests.state.device.host_kernel import HostHasher

REF = "runs/device"
CAPTURE = import_module("tensorstore_ck.state.capture")  # the package has a function of this name
BLOCK_BYTES = 64 << 10
ELEMENTS = 120_000


class Device(HostHasher):
    """Counts what is read, too."""

    read_bytes = 0
    after_hash: Callable[[], object] = staticmethod(lambda: None)

    def hash(self, addresses: Numbers, sizes_bytes: Numbers) -> Ids:
        ids = super().hash(addresses, sizes_bytes)
        self.after_hash()
        return ids


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Every tensor is on it: none is read in place."""
    found = Device()
    monkeypatch.setattr(CAPTURE, "device_blocks", lambda: DeviceBlocks(lambda _: found, lambda _: found))
    monkeypatch.setattr(byte_sources, "is_dense", lambda tensor: False)
    monkeypatch.setattr(TensorTable, "add_run", lambda self, items, start: start)
    read = byte_sources.CopySource.read

    def counted(source: byte_sources.CopySource, start: int, stop: int) -> memoryview:
        found.read_bytes += stop - start
        return read(source, start, stop)

    monkeypatch.setattr(byte_sources.CopySource, "read", counted)
    return found


@pytest.fixture
def store(tmp_path: Path) -> Iterator[tsck.Store]:
    make_store(tmp_path, block_bytes=BLOCK_BYTES)
    with tsck.open(tmp_path / "store", cache_dir=tmp_path / "cache") as opened:
        yield opened


def make_state() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31 - 1, (ELEMENTS,), generator=draw, dtype=torch.int32)
    floats = torch.randn(ELEMENTS, generator=draw)
    return {
        "int32": words.clone(),
        "odd": torch.randint(-128, 127, (3 * BLOCK_BYTES + 300_001,), generator=draw, dtype=torch.int8)[1:],
        "bfloat16": torch.randn(3 * 100_003, generator=draw).bfloat16().view(3, 100_003),
        "float64": torch.randn(ELEMENTS, generator=draw, dtype=torch.float64),
        "transposed": floats.clone().view(300, 400).t(),
        "columns": torch.randn(700, 400, generator=draw)[:, 100:203],
        "conj": torch.complex(floats, floats.flip(0)).conj(),
        "neg": torch.complex(floats, floats.flip(0)).conj().imag,
        "complex128": torch.complex(floats, floats.flip(0)).to(torch.complex128),
        "small": torch.arange(1000.0),
        "scalar": torch.tensor(3.0),
    }


def change(state: dict[str, torch.Tensor], draw: random.Random) -> None:
    """A row or an element of a few tensors."""
    for name in draw.sample(sorted(state.keys() - {"scalar"}), draw.randrange(1, 4)):
        state[name][draw.randrange(len(state[name]))] += 1


def put_by_host(store: tsck.Store, state: Any, ref: str, step: int) -> tsck.Snapshot:
    """The same state, without a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CAPTURE, "device_blocks", lambda: None)
        return store.put_snapshot(state, ref=ref, step=step, unchanged="ok")


@pytest.mark.parametrize("seed", range(effort(2, 30)))
def test_any_changes_have_the_roots_of_the_host(device: Device, store: tsck.Store, seed: int) -> None:
    state, draw = make_state(), random.Random(seed)
    for step in range(5):
        by_device = store.put_snapshot(state, ref=REF, step=step, unchanged="ok")
        assert by_device.root == put_by_host(store, state, "host", step).root
        change(state, draw)
    assert device.hashed_bytes > 0


@pytest.mark.filterwarnings("ignore::tensorstore_ck.SuspiciousSaveWarning")
def test_roots_are_those_of_the_host_where_numbers_are_not_finite(device: Device, store: tsck.Store) -> None:
    """The share of them in the sample is in the metadata, and the sample does not depend on what is read."""
    every = make_state()
    state = {name: every[name] for name in ("float64", "bfloat16", "transposed", "complex128")}
    records = []
    for step in range(6):
        if step % 2 == 0:
            for tensor in state.values():
                tensor[step::5] = float("inf")
        by_device = store.put_snapshot(state, ref=REF, step=step, unchanged="ok")
        assert by_device.root == put_by_host(store, state, "host", step).root
        records.append(store.engine.read_record(store.engine.resolve(REF).info))
    assert sum(b"non_finite" in record.metadata for record in records) > 3


def test_unchanged_blocks_are_not_read(device: Device, store: tsck.Store) -> None:
    state = {"a": torch.arange(ELEMENTS), "b": torch.arange(ELEMENTS).view(300, 400).t()}
    store.put_snapshot(state, ref=REF, step=1)
    device.read_bytes = 0
    store.put_snapshot(state, ref=REF, step=2, unchanged="ok")
    assert device.read_bytes == 0
    state["a"][70_000] += 1
    store.put_snapshot(state, ref=REF, step=3)
    assert BLOCK_BYTES <= device.read_bytes < 3 * BLOCK_BYTES
    assert torch.equal(store.checkout(REF)["a"], state["a"])


def test_a_flipped_bit_in_each_block_is_noticed(device: Device, store: tsck.Store) -> None:
    words = torch.arange(2 * BLOCK_BYTES + 7000, dtype=torch.int32)
    state = {"dense": words[1:], "transposed": words[: 400 * 200].clone().view(400, 200).t()}
    bases = {"dense": state["dense"], "transposed": state["transposed"].t().view(-1)}
    store.put_snapshot(state, ref=REF, step=0)
    step = 0
    for name, base in bases.items():
        for position in range(0, len(base), BLOCK_BYTES // 4):
            base[position] ^= 1 << step % 31
            step += 1
            store.put_snapshot(state, ref=REF, step=step)
            assert [each.name for each in store.diff(f"{REF}~1", REF).tensors] == [name]
    assert all(torch.equal(store.checkout(REF)[name], tensor) for name, tensor in state.items())


def test_a_wrong_id_stops_the_save(device: Device, store: tsck.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are written have the ids that the host computes from the bytes, and the device must agree."""
    hashed = Device.hash

    def wrong(self: Device, addresses: Numbers, sizes_bytes: Numbers) -> Ids:
        ids = hashed(self, addresses, sizes_bytes)
        ids[0, 0] ^= 1
        return ids

    monkeypatch.setattr(Device, "hash", wrong)
    with pytest.raises(CaptureChangedError, match="changed while being captured"):
        store.put_snapshot({"a": torch.arange(ELEMENTS)}, ref=REF, step=1)
    assert store.log() == []
    store.put_snapshot({"a": torch.arange(ELEMENTS)}, ref=REF, step=1, verify_capture=0)
    assert torch.equal(store.checkout(REF)["a"], torch.arange(ELEMENTS))


def test_a_tensor_that_changes_after_it_was_hashed_stops_the_save(device: Device, store: tsck.Store) -> None:
    state = {"a": torch.arange(ELEMENTS), "b": torch.arange(ELEMENTS) + 1}
    store.put_snapshot(state, ref=REF, step=1)
    device.after_hash = lambda: state["b"][5:6].add_(1)
    with pytest.raises(CaptureChangedError, match="b changed"):
        store.put_snapshot(state, ref=REF, step=2, unchanged="ok")
    assert len(store.log(REF)) == 1


def test_a_device_that_fails_leaves_the_ids_to_the_host(device: Device, store: tsck.Store) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    state = make_state()
    device.after_hash = fail
    with pytest.warns(UserWarning, match="hashed by the host this time: out of memory"):
        found = store.put_snapshot(state, ref=REF, step=1)
    assert found.root == put_by_host(store, state, "host", 1).root


def test_frozen_tensors_and_their_check(device: Device, store: tsck.Store) -> None:
    state = {"a": torch.arange(ELEMENTS), "b": torch.arange(ELEMENTS)}
    store.put_snapshot(state, ref=REF, step=0, frozen=["a"])
    for step in (1, 2):
        state["b"][step] += 7
        store.put_snapshot(state, ref=REF, step=step, frozen=["a"])
    assert torch.equal(store.checkout(REF)["b"], state["b"])

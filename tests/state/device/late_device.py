"""A device whose copies come late. The CPU plays it: every tensor is on it, ids are computed by the kernel's C."""

import threading
from collections.abc import Callable, Sequence
from importlib import import_module

import pytest
import torch

from tensorstore_ck.state import arena, byte_sources, capture_copy
from tensorstore_ck.state.device.device_blocks import DeviceBlocks
from tensorstore_ck.state.device.kernel import Ids, Numbers
from tensorstore_ck.state.device.side_streams import DeviceCopy, StreamOf
from tensorstore_ck.state.tensor_table import TensorTable
from tests.effort import PATIENCE_SECONDS
from tests.state.device.host_kernel import Hashed, HostHasher


class LateBatch:
    """Copies that are made when the device comes to them, or at once if a stream is held for them."""

    def __init__(self, device: "LateDevice", copies: Sequence[DeviceCopy]) -> None:
        self._device = device
        self.copies = copies
        self.then: list[Callable[[], None]] = []
        self.is_done = threading.Event()

    def run(self) -> None:
        if not self.is_done.is_set():
            for tensor, target in self.copies:
                target.copy_(tensor)
            for work in self.then:
                work()
            self.is_done.set()

    def wait(self) -> None:
        assert self.is_done.wait(PATIENCE_SECONDS)

    def hold_streams(self, stream_of: StreamOf | None = None) -> None:
        if stream_of is None:
            self.run()
        else:
            self._device.hashed_after = self


class LateHash:
    """The ids of blocks after a batch."""

    def __init__(self, batch: LateBatch, compute: Callable[[], Ids]) -> None:
        self._batch = batch
        self._found: list[Ids] = []
        if batch.is_done.is_set():
            self._found.append(compute())
        else:
            batch.then.append(lambda: self._found.append(compute()))

    def wait(self) -> Ids:
        self._batch.wait()
        return self._found[0]

    def hold_stream(self) -> None:
        self._batch.run()


class LateDevice:
    """`DeviceCopies` of late copies."""

    def __init__(self) -> None:
        self.hasher = LateHasher(self)
        self.batches: list[LateBatch] = []
        self.hashed_after: LateBatch | None = None

    @property
    def late(self) -> list[LateBatch]:
        """The batches that have not come yet."""
        return [batch for batch in self.batches if batch.copies and not batch.is_done.is_set()]

    def run(self) -> None:
        for batch in self.batches:
            batch.run()

    def start(self, copies: Sequence[DeviceCopy]) -> LateBatch:
        self.batches.append(LateBatch(self, copies))
        return self.batches[-1]


class LateHasher:
    """`BlockHasher` of a late device."""

    def __init__(self, device: LateDevice) -> None:
        self._device = device
        self._host = HostHasher()

    def start(self, addresses: Numbers, sizes_bytes: Numbers) -> Hashed | LateHash:
        batch, self._device.hashed_after = self._device.hashed_after, None
        if batch is None:
            return self._host.start(addresses, sizes_bytes)
        return LateHash(batch, lambda: self._host.hash(addresses, sizes_bytes))


def put_tensors_on(device: LateDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor is on the device from now on."""
    capture = import_module("tensorstore_ck.state.capture")  # the package has a function of this name
    monkeypatch.setattr(capture, "device_blocks", lambda: DeviceBlocks(lambda _: device.hasher, lambda _: device.hasher))
    monkeypatch.setattr(byte_sources, "is_dense", lambda tensor: False)
    monkeypatch.setattr(TensorTable, "add_run", lambda self, items, start: start)
    monkeypatch.setattr(capture_copy, "is_on_device", lambda found: isinstance(found, torch.Tensor))
    monkeypatch.setattr(arena, "SideStreams", lambda: device)

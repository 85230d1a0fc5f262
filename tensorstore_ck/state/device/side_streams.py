"""Copies from CUDA devices into host memory while the caller computes. Knows tensors and streams; no state, no slot.

Stream order makes the copies safe: the side stream waits for the work that the caller has queued, so that it copies finished values; work
that overwrites them waits for the side stream (`DeviceArrival.hold_streams`). Only readers of the copies wait on the CPU.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeGuard

import numpy as np
import numpy.typing as npt
import torch

from tensorstore_ck.format.block_assignment import row_boxes
from tensorstore_ck.state.plain_memory import is_dense

PIECE_BYTES: Final = 32 << 20
"""Bytes of a non-dense tensor that are gathered at a time."""


def is_on_device(tensor: torch.Tensor | npt.NDArray[Any]) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor on a CUDA device."""
    return not isinstance(tensor, np.ndarray) and tensor.is_cuda


StreamOf = Callable[[torch.device], torch.cuda.Stream]


class DeviceCopy(NamedTuple):
    """One copy to make."""

    tensor: torch.Tensor
    target: torch.Tensor
    """On the CPU, contiguous, of the same dtype and shape."""


class DeviceArrival(Protocol):
    """Copies under way."""

    def wait(self) -> None:
        """Returns when all copies are complete. Thread-safe, and cheap once they are."""

    def hold_streams(self, stream_of: StreamOf | None = None) -> None:
        """Work that is queued later on these streams, by default this thread's current ones, comes after the copies. Does not wait."""


class DeviceCopies(Protocol):
    """A way to copy from devices."""

    def start(self, copies: Sequence[DeviceCopy]) -> DeviceArrival:
        """Starts copies of what the work queued on the current streams leaves. Other work may overwrite it: see `hold_streams`."""


class SideStreams:
    """`DeviceCopies` of CUDA. Keeps one stream per device, since torch caches memory by stream."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, copies: Sequence[DeviceCopy]) -> DeviceArrival:
        """Starts copies; they do not block where the targets are pinned."""
        of_device: dict[torch.device, list[DeviceCopy]] = {}
        for copy in copies:
            of_device.setdefault(copy.tensor.device, []).append(copy)
        try:
            return _Events([self._start(device, several) for device, several in of_device.items()])
        except BaseException:
            for stream in self._streams.values():  # the caller reuses the memory, so no copy may still write to it
                stream.synchronize()
            raise

    def _start(self, device: torch.device, copies: Sequence[DeviceCopy]) -> "_DeviceEvent":
        stream = self._streams.setdefault(device, torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for copy in copies:
                for tensor, target in _pieces(copy):
                    # A lazy conjugate or negative would be resolved on the CPU, before its bytes have arrived.
                    target.copy_(tensor.resolve_conj().resolve_neg().contiguous(), non_blocking=True)
                copy.tensor.record_stream(stream)
        return _DeviceEvent(device, stream.record_event())


def _pieces(copy: DeviceCopy) -> Iterator[DeviceCopy]:
    """A dense tensor in one piece; any other in several, since each piece is made dense on the device first."""
    tensor, target = copy
    if is_dense(tensor):
        yield copy
        return
    count = max(PIECE_BYTES // tensor.itemsize, 1)
    for first in range(0, tensor.numel(), count):
        for offsets, sizes in row_boxes(tuple(tensor.shape), first, min(first + count, tensor.numel())):
            index = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
            yield DeviceCopy(tensor[index], target[index])


class _DeviceEvent(NamedTuple):
    device: torch.device
    event: torch.cuda.Event


class _Events:
    def __init__(self, events: Sequence[_DeviceEvent]) -> None:
        self._left = self._events = events
        self._lock = threading.Lock()

    def wait(self) -> None:
        if self._left:
            with self._lock:  # one thread asks CUDA: many that did kept kernels of the training from being launched
                for _, event in self._left:
                    event.synchronize()
                self._left = ()

    def hold_streams(self, stream_of: StreamOf | None = None) -> None:
        for device, event in self._events:
            (stream_of or torch.cuda.current_stream)(device).wait_event(event)

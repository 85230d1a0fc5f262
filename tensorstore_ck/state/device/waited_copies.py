"""Copies from and to CUDA devices, on one stream a direction. Each copy is complete when its function returns.

The caller computes on other streams, so `follow` orders these after the work that the caller has queued. They go through pinned windows.
"""

import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.state.device.pinned_windows import IN_BYTES, OUT_BYTES, Windows, view_of

SMALL_BYTES: Final = 64 << 10
"""Smaller copies use no window: many small tensors would use all windows."""


class PieceCopy(NamedTuple):
    """Elements of a tensor on a device, and how many bytes they take."""

    elements: torch.Tensor
    size_bytes: int


class WaitedCopies:
    """Copies from and to one device. Thread-safe."""

    def __init__(self, device: torch.device, out_windows: Windows, in_windows: Windows) -> None:
        self._device = device
        self._out_windows = out_windows
        self._in_windows = in_windows
        self._turn = threading.Lock()
        """One copy to the host at a time: 16 threads that waited for copies of their own had four fifths of the speed."""
        self.out_stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        """Reads tensors."""
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Later copies come after the work that is queued on the current stream of this thread. Does not wait."""
        current = torch.cuda.current_stream(self._device)
        if not current.query():
            event = current.record_event()
            self.out_stream.wait_event(event)
            self._in.wait_event(event)

    def fetch(self, pieces: Sequence[PieceCopy]) -> memoryview:
        """The bytes of the pieces, one after another; a window, if they fit into one."""
        size_bytes = sum(piece.size_bytes for piece in pieces)
        fetched = _view_of_one(self._out_windows, size_bytes)
        if fetched is None:
            fetched = memoryview(bytearray(size_bytes))
        if size_bytes:
            self._fetch_into(pieces, torch.frombuffer(fetched, dtype=torch.uint8))
        return fetched

    def window(self, size_bytes: int) -> memoryview | None:
        """Memory that `fill` copies from fastest; None if all is in use."""
        return _view_of_one(self._in_windows, size_bytes)

    def fill(self, target: torch.Tensor, elements: torch.Tensor) -> None:
        """Copies elements from the host to a device tensor of the same size; the device converts them."""
        with torch.cuda.stream(self._in):
            target.copy_(elements.view(target.shape), non_blocking=True)
            copied = self._in.record_event()
        copied.synchronize()  # not the stream: that would wait for the copies of other threads, too

    def _fetch_into(self, pieces: Sequence[PieceCopy], memory: torch.Tensor) -> None:
        at = 0
        with self._turn, torch.cuda.stream(self.out_stream):
            for elements, size_bytes in pieces:
                # A lazy conjugate or negative would be resolved on the CPU, or lost, in a copy from a device.
                elements = elements.resolve_conj().resolve_neg()
                memory[at : at + size_bytes].view(elements.dtype).view(elements.shape).copy_(elements)
                at += size_bytes


def _view_of_one(windows: Windows, size_bytes: int) -> memoryview | None:
    """The beginning of a window; None if the size is not for one, or all are in use."""
    window = windows.take() if SMALL_BYTES <= size_bytes <= windows.window_bytes else None
    return None if window is None else view_of(window, size_bytes)


@cache
def _windows(window_bytes: int) -> Windows:
    return Windows(window_bytes)


@cache
def copies_of(device: torch.device) -> WaitedCopies:
    """The copies of a device. Pinned memory belongs to the process, so all stores that it has open share the windows."""
    return WaitedCopies(device, _windows(OUT_BYTES), _windows(IN_BYTES))


def follow(tensor: Any) -> None:
    """If it is on a CUDA device: `WaitedCopies.follow` for that device."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        copies_of(tensor.device).follow()


def follow_all(devices: Iterable[object]) -> None:
    """`WaitedCopies.follow` for each CUDA device among these."""
    for device in set(devices):
        if isinstance(device, torch.device) and device.type == "cuda":
            copies_of(device).follow()

"""Copies from and to CUDA devices, on one stream a direction. Each copy is complete when its function returns.

The caller computes on other streams, so `follow` orders these after the work that the caller has queued. Reads go through pinned windows.
"""

import threading
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import torch

from tensorstore_ck.state.device.windows import WINDOW_BYTES, Windows, view_of

SMALL_BYTES: Final = 64 << 10
"""Smaller copies use no window: many small tensors would use all windows."""


class PieceCopy(NamedTuple):
    """Elements of a tensor on a device, and how many bytes they take."""

    elements: torch.Tensor
    size_bytes: int


class WindowCopies:
    """Copies from and to one device. Thread-safe."""

    def __init__(self, device: torch.device, windows: Windows) -> None:
        self._device = device
        self._windows = windows
        self._turn = threading.Lock()
        """One copy to the host at a time: 16 threads that waited for copies of their own had four fifths of the speed."""
        self._out: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @property
    def out_stream(self) -> torch.cuda.Stream:
        """The stream that reads tensors."""
        return self._out

    def follow(self) -> None:
        """Later copies come after the work that is queued on the current stream of this thread. Does not wait."""
        current = torch.cuda.current_stream(self._device)
        if not current.query():
            event = current.record_event()
            self._out.wait_event(event)
            self._in.wait_event(event)

    def fetch(self, pieces: Sequence[PieceCopy]) -> memoryview:
        """The bytes of the pieces, one after another; a window, if they fit into one."""
        size_bytes = sum(piece.size_bytes for piece in pieces)
        window = self._windows.take() if SMALL_BYTES <= size_bytes <= WINDOW_BYTES else None
        fetched = memoryview(bytearray(size_bytes)) if window is None else view_of(window, size_bytes)
        if size_bytes:
            self._fetch_into(pieces, torch.frombuffer(fetched, dtype=torch.uint8))
        return fetched

    def fill(self, target: torch.Tensor, elements: torch.Tensor) -> None:
        """Copies elements from the host to a device tensor of the same size; the device converts them. A window would be slower."""
        with torch.cuda.stream(self._in):
            target.copy_(elements.view(target.shape))
            if target.dtype != elements.dtype or not target.is_contiguous():
                self._in.synchronize()  # the device converts and distributes after the copy, for which torch has waited

    def _fetch_into(self, pieces: Sequence[PieceCopy], memory: torch.Tensor) -> None:
        at = 0
        with self._turn, torch.cuda.stream(self._out):
            for elements, size_bytes in pieces:
                # A lazy conjugate or negative would be resolved on the CPU, or lost, in a copy from a device.
                elements = elements.resolve_conj().resolve_neg()
                memory[at : at + size_bytes].view(elements.dtype).view(elements.shape).copy_(elements)
                at += size_bytes


@cache
def _windows() -> Windows:
    return Windows()


@cache
def copies_of(device: torch.device) -> WindowCopies:
    """The copies of a device. Pinned memory belongs to the process, so all stores that it has open share the windows."""
    return WindowCopies(device, _windows())


def out_stream_of(device: torch.device) -> torch.cuda.Stream:
    """The stream that reads tensors of a device."""
    return copies_of(device).out_stream


def follow(tensor: Any) -> None:
    """If it is on a CUDA device: `WindowCopies.follow` for that device."""
    if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
        copies_of(tensor.device).follow()


def follow_all(devices: Iterable[object]) -> None:
    """`WindowCopies.follow` for each CUDA device among these."""
    for device in set(devices):
        if isinstance(device, torch.device) and device.type == "cuda":
            copies_of(device).follow()

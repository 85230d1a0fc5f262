"""Copies from and to CUDA devices, on one stream a direction. Each copy is complete when its function returns.

The caller computes on other streams, so `follow` orders these after the work that the caller has queued. They go through windows of pinned
memory, which are reused: devices copy there at the speed of the bus, but pinning 1 GiB takes a third of a second, so a process pins a
little, once.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

SMALL_BYTES: Final = 64 << 10
"""Smaller copies use no window: many small tensors would use all windows."""


Window = npt.NDArray[np.uint8]

OUT_BYTES: Final = 4 << 20
"""A window that is copied to: a block, by default; each thread that reads has some."""
IN_BYTES: Final = 16 << 20
"""A window that is copied from. Copies of single blocks had half the speed."""
SLAB_BYTES: Final = 64 << 20
"""Pinned together."""
MAX_SLABS: Final = 5
"""20 windows to copy from: 18 threads read on 16 cores."""


def _pinned(size_bytes: int) -> Window:
    memory: Window = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class Windows:
    """Windows of one size, in up to `MAX_SLABS` pieces of memory that are allocated when they are needed. Thread-safe."""

    def __init__(self, window_bytes: int, allocate: Callable[[int], Window] = _pinned) -> None:
        self.window_bytes = window_bytes
        self._allocate = allocate
        self._lock = threading.Lock()
        self._slabs = 0
        self._free: deque[Window] = deque()  # no lock: the garbage collector also returns windows

    def take(self) -> Window | None:
        """A window, which stays in use while it or a view of its memory is referenced; None if all are in use. Never waits."""
        window = self._pop()
        if window is None:
            with self._lock:
                window = self._pop()
                if window is None and self._slabs < MAX_SLABS:
                    slab = self._allocate(SLAB_BYTES)
                    self._slabs += 1
                    size_bytes = self.window_bytes
                    self._free.extend(slab[start : start + size_bytes] for start in range(0, SLAB_BYTES, size_bytes))
                    window = self._pop()
        if window is None:
            return None
        lent: Window = np.frombuffer(window.data, np.uint8)
        weakref.finalize(lent, self._free.append, window).atexit = False
        return lent

    def _pop(self) -> Window | None:
        try:
            return self._free.pop()  # the one that was used last is most likely in a cache
        except IndexError:
            return None


def view_of(window: Window, size_bytes: int) -> memoryview:
    """The beginning of a window. The window is in use as long as this view, or a view of it, is there."""
    return window.data[:size_bytes]


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

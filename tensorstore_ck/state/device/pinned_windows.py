"""Pinned host memory for copies from devices, cut into windows that are reused.

Devices copy to pinned memory at the speed of the bus. Pinning 1 GiB takes a third of a second, so a process pins a little, once.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

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

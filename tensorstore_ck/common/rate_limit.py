"""A token bucket: how many bytes per second may pass. The clock is injected. It does not wait itself.

Its users wait: `backend.throttled` for plain reads and writes, `backend.staging.upload_pass` for uploads from a staging disk.
"""

import threading
import time
from collections.abc import Callable
from typing import Final

from tensorstore_ck.common.units import parse_rate

BURST_SECONDS: Final = 0.25
"""Unused capacity is kept this long."""


class RateLimit:
    """Limits all threads together to `rate`: bytes per second, or text such as ``100MB``."""

    def __init__(
        self,
        rate: float | str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with an empty bucket. Raises `InvalidOptionError` if it is not a rate."""
        self._rate = self._whole = parse_rate(rate)
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()
        """When all bytes taken so far will have passed."""

    def share(self, among: int) -> None:
        """From now on this is one of `among` processes that share the rate."""
        with self._lock:
            self._rate = self._whole / max(among, 1)

    @property
    def burst_bytes(self) -> int:
        """The most bytes that are worth taking at once."""
        return max(1, int(self._rate * BURST_SECONDS))

    def take(self, count: int) -> float:
        """Takes `count` bytes; returns the seconds until they may pass."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - BURST_SECONDS) + count / self._rate
            return max(0.0, self._free_at - now)

"""A token bucket: how many bytes a second may pass. The clock is injected; it waits for nobody, and does not know what the bytes are."""

import threading
import time
from collections.abc import Callable
from typing import Final

from tensorstore_ck.common.units import parse_rate

BURST_SECONDS: Final = 0.25
"""What was not used is kept for so long."""


class RateLimit:
    """Lets `rate` pass, of all threads together: bytes per second, or text such as ``100MB``."""

    def __init__(
        self,
        rate: float | str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins with an empty bucket.

        Raises:
            InvalidOptionError: not a rate.
        """
        self._rate = self._whole = parse_rate(rate)
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock()
        """When all that was taken so far will have passed."""

    def share(self, among: int) -> None:
        """From now on this is one of `among` processes that pass so many bytes together."""
        with self._lock:
            self._rate = self._whole / max(among, 1)

    @property
    def burst_bytes(self) -> int:
        """As much as is worth asking for at a time."""
        return max(1, int(self._rate * BURST_SECONDS))

    def take(self, count: int) -> float:
        """Takes `count` bytes, however many that is; returns in how many seconds they may pass."""
        with self._lock:
            now = self._clock()
            self._free_at = max(self._free_at, now - BURST_SECONDS) + count / self._rate
            return max(0.0, self._free_at - now)

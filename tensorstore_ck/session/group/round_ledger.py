"""Which rounds of a rank are open, and which keys of ended ones it may delete."""

import threading
from bisect import bisect_left

from tensorstore_ck.session.group.channel import Channel


class RoundLedger:
    """Which rounds of this rank are open, and which keys it wrote in those that ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._open: set[int] = set()
        self._ended: dict[int, Channel] = {}

    def begin(self) -> int:
        """The number of the next round, from 1."""
        with self._lock:
            self._count += 1
            self._open.add(self._count)
            return self._count

    def end(self, n: int, channel: Channel | None) -> None:
        """Ends round `n` for this rank, which reads none of its keys any more."""
        with self._lock:
            self._open.discard(n)
            if channel is not None:
                self._ended[n] = channel

    def oldest(self) -> int:
        """The lowest open round."""
        with self._lock:
            return min(self._open, default=self._count + 1)

    def take_before(self, n: int) -> list[Channel]:
        """The channels of rounds before `n` that ended; each is returned once."""
        with self._lock:
            ended = sorted(self._ended)
            return [self._ended.pop(n_ended) for n_ended in ended[: bisect_left(ended, n)]]

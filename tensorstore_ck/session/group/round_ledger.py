"""Which attempts of a rank go on: a key of the group's store is deleted only when nobody asks for it any more."""

import threading

from tensorstore_ck.session.group.channel import Channel


class RoundLedger:
    """Which attempts of this rank go on, and which keys it wrote in those that ended. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._open: set[int] = set()
        self._ended: dict[int, Channel] = {}

    def begin(self) -> int:
        """The number of the next attempt, from 1."""
        with self._lock:
            self._count += 1
            self._open.add(self._count)
            return self._count

    def end(self, n: int, channel: Channel | None) -> None:
        """Attempt `n` is over for this rank: it asks for none of its keys any more."""
        with self._lock:
            self._open.discard(n)
            if channel is not None:
                self._ended[n] = channel

    def oldest(self) -> int:
        """The lowest attempt that goes on."""
        with self._lock:
            return min(self._open, default=self._count + 1)

    def take_before(self, n: int) -> list[Channel]:
        """The channels of attempts that ended, up to `n`; each is returned once."""
        with self._lock:
            return [self._ended.pop(ended) for ended in sorted(self._ended) if ended < n]

"""The steps of a rank in a round of its group; which of its rounds are open, and which keys of ended ones it may delete."""

import threading
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple, NoReturn, Self

from tensorstore_ck.format.sealed import Body
from tensorstore_ck.session.group.channel import Channel


class Participant(NamedTuple):
    """The caller's steps in a round. Records are small maps of msgpack types. An error in any of the steps ends the round."""

    propose: Callable[[], Body]
    """Returns this rank's proposal: what it is about to do."""
    execute: Callable[[Body], Body]
    """Does this rank's part, durably; gets the record of `compare`, returns the result."""
    resolve: Callable[[], Body | None] | None
    """Appends "abort" to the log, unless the log says "put" already. Returns the outcome's record if put, None if
    aborted. The field is None for rounds that leave nothing in the log."""
    compare: Callable[[list[Body]], Body | str]
    """On rank 0, with the proposals of all ranks in order: the answer to all; or, as text, why their states do not fit together. All ranks
    raise an input error that it raises."""
    commit: Callable[[list[Body]], Body]
    """On rank 0, with the results of all ranks, in order: appends the save to the log; returns the outcome's record."""
    begins_rounds: bool = False
    """Whether `execute` begins rounds. If it does, a rank that sees answer and outcome at once executes, too, so that all count the same
    rounds."""

    @classmethod
    def failed(cls, error: BaseException, resolve: Callable[[], Body | None] | None) -> Self:
        """A rank that cannot take part: its error is its proposal, and ends the round on all ranks."""

        def refuse(*_: object) -> NoReturn:
            raise error

        return cls(propose=refuse, execute=refuse, resolve=resolve, compare=refuse, commit=refuse)


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

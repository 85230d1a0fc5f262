"""A stream of pieces from one rank to another, with two buffers on either side, whose lengths both sides know.

The sender may give up instead of any piece, and the receiver says after each whether it goes on: either way both sides know, nothing is
left on the way, and the link serves the next stream. The sender is at most one piece ahead of the receiver's word.
Knows nothing of files.
"""

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np

from tensorstore_ck.session.peers.link import BACK, FORTH, MAC_BYTES, Bytes, ForgedMessageError, OutgoingMessage, PeerLink

PIECE_BYTES: Final = 8 << 20
BUFFERS: Final = 2
_HEAD_BYTES: Final = 64
"""Before each piece: whether it is one."""
_GIVEN_UP: Final = 1
_STOP: Final = 1


class ReceiverAbortedError(Exception):
    """The receiver does not go on."""


class SenderAbortedError(Exception):
    """The sender does not go on."""


class ForgedPieceError(Exception):
    """A piece is not what the sender sent."""


def piece_lengths(size_bytes: int, piece_bytes: int) -> list[int]:
    """The pieces of one object; an empty one has an empty piece."""
    return [min(piece_bytes, size_bytes - at) for at in range(0, size_bytes, piece_bytes)] or [0]


def make_buffers(piece_bytes: int) -> list[Bytes]:
    """Those of one side."""
    return [np.zeros(_HEAD_BYTES + piece_bytes + MAC_BYTES, np.uint8) for _ in range(BUFFERS)]


class PieceSender:
    """The sender's side: `room`, fill, `send`, for each piece; then `finish`. Or `give_up`."""

    def __init__(self, link: PeerLink, peer: int, buffers: list[Bytes], lengths: Sequence[int]) -> None:
        self._link = link
        self._peer = peer
        self._buffers = buffers
        self._lengths = lengths
        self._number = 0
        self._under_way: deque[OutgoingMessage] = deque()

    def room(self) -> memoryview:
        """Where the next piece goes.

        Raises:
            RefusedError: the receiver does not want it.
        """
        if len(self._under_way) == BUFFERS:
            self._settle()
        return self._piece().data[_HEAD_BYTES:-MAC_BYTES]

    def send(self) -> None:
        """Sends what was filled in."""
        self._send(0)

    def give_up(self) -> None:
        """Has the receiver know that nothing follows."""
        try:
            self.room()
            self._send(_GIVEN_UP)
            while len(self._under_way) > 1:
                self._settle()
        except ReceiverAbortedError:
            return  # the receiver did so first
        self._under_way.popleft().wait()

    def finish(self) -> None:
        """Returns when the receiver has taken care of all pieces.

        Raises:
            RefusedError: it could not.
        """
        while self._under_way:
            self._settle()

    def _piece(self) -> Bytes:
        return self._buffers[self._number % BUFFERS][: _HEAD_BYTES + self._lengths[self._number] + MAC_BYTES]

    def _send(self, flag: int) -> None:
        piece = self._piece()
        piece[0] = flag
        self._under_way.append(self._link.send(self._peer, FORTH, piece))
        self._number += 1

    def _settle(self) -> None:
        self._under_way.popleft().wait()
        word = np.zeros(1 + MAC_BYTES, np.uint8)
        self._link.receive(self._peer, BACK, word).wait()
        if word[0] == _STOP:
            while self._under_way:  # the receiver takes one more, and throws it away
                self._under_way.popleft().wait()
            raise ReceiverAbortedError("it could not keep it, and has logged why")


class PieceReceiver:
    """The receiver's side: `next` for each piece, which says of the one before that it was taken care of; then `finish`. Or `refuse`."""

    def __init__(self, link: PeerLink, peer: int, buffers: list[Bytes], lengths: Sequence[int]) -> None:
        self._link = link
        self._peer = peer
        self._buffers = buffers
        self._lengths = lengths
        self._number = -1
        self._said: OutgoingMessage | None = None
        self._coming: OutgoingMessage | None = self._receive(0)

    def next(self) -> memoryview:
        """The next piece, valid until the next call.

        Raises:
            ForgedPieceError: what came is not what the sender sent. `refuse` comes next.
            GivenUpError: the sender sent none.
        """
        if self._number >= 0:
            self._say(0)
        assert self._coming is not None
        forged = None
        try:
            self._coming.wait()
        except ForgedMessageError as exc:
            forged = exc
        self._number += 1
        piece = self._buffers[self._number % BUFFERS]
        if forged is None and piece[0] == _GIVEN_UP:
            self._coming = None
            self._wait_until_heard()
            raise SenderAbortedError
        self._coming = self._receive(self._number + 1) if self._number + 1 < len(self._lengths) else None
        if forged is not None:
            raise ForgedPieceError(str(forged)) from forged
        return piece.data[_HEAD_BYTES : _HEAD_BYTES + self._lengths[self._number]]

    def finish(self) -> None:
        """All pieces were taken care of."""
        self._say(0)
        self._wait_until_heard()

    def refuse(self) -> None:
        """Has the sender know that this side does not go on, after a `next` that returned."""
        self._say(_STOP)
        if self._coming is not None:
            with contextlib.suppress(ForgedMessageError):  # it is thrown away
                self._coming.wait()
        self._wait_until_heard()

    def _receive(self, number: int) -> OutgoingMessage:
        buffer = self._buffers[number % BUFFERS]
        return self._link.receive(self._peer, FORTH, buffer[: _HEAD_BYTES + self._lengths[number] + MAC_BYTES])

    def _say(self, word: int) -> None:
        self._wait_until_heard()
        self._said = self._link.send(self._peer, BACK, np.array([word, *bytes(MAC_BYTES)], np.uint8))

    def _wait_until_heard(self) -> None:
        said, self._said = self._said, None
        if said is not None:
            said.wait()

"""A stream of pieces from one rank to another, with two buffers on either side; both sides know the lengths of all pieces.

The sender may give up instead of sending a piece, and the receiver confirms or stops after each: then both sides know it, no message is
left over, and the link can be used for the next stream. The sender is at most one piece ahead. Knows nothing of files.
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
"""The header before each piece: whether the sender gives up."""
_GIVEN_UP: Final = 1
_STOP: Final = 1


class ReceiverAbortedError(Exception):
    """The receiver stopped."""


class SenderAbortedError(Exception):
    """The sender gave up."""


class ForgedPieceError(Exception):
    """A piece is not what the sender sent."""


def piece_lengths(size_bytes: int, piece_bytes: int) -> list[int]:
    """The pieces of one object; an empty one has an empty piece."""
    return [min(piece_bytes, size_bytes - at) for at in range(0, size_bytes, piece_bytes)] or [0]


def make_buffers(piece_bytes: int) -> list[Bytes]:
    """The buffers of one side."""
    return [np.zeros(_HEAD_BYTES + piece_bytes + MAC_BYTES, np.uint8) for _ in range(BUFFERS)]


class PieceSender:
    """The sender's side: `buffer`, fill, `send`, for each piece; then `finish`. Or `give_up`."""

    def __init__(self, link: PeerLink, peer: int, buffers: list[Bytes], lengths: Sequence[int]) -> None:
        self._link = link
        self._peer = peer
        self._buffers = buffers
        self._lengths = lengths
        self._number = 0
        self._under_way: deque[OutgoingMessage] = deque()

    def buffer(self) -> memoryview:
        """Memory for the next piece.

        Raises:
            ReceiverAbortedError: the receiver does not want it.
        """
        if len(self._under_way) == BUFFERS:
            self._confirm()
        return self._piece().data[_HEAD_BYTES:-MAC_BYTES]

    def send(self) -> None:
        """Sends the filled buffer."""
        self._send(0)

    def give_up(self) -> None:
        """Informs the receiver that nothing follows."""
        try:
            self.buffer()
            self._send(_GIVEN_UP)
            while len(self._under_way) > 1:
                self._confirm()
        except ReceiverAbortedError:
            return  # the receiver stopped first
        self._under_way.popleft().wait()

    def finish(self) -> None:
        """Returns when the receiver has confirmed all pieces.

        Raises:
            ReceiverAbortedError: it stopped.
        """
        while self._under_way:
            self._confirm()

    def _piece(self) -> Bytes:
        return self._buffers[self._number % BUFFERS][: _HEAD_BYTES + self._lengths[self._number] + MAC_BYTES]

    def _send(self, flag: int) -> None:
        piece = self._piece()
        piece[0] = flag
        self._under_way.append(self._link.send(self._peer, FORTH, piece))
        self._number += 1

    def _confirm(self) -> None:
        self._under_way.popleft().wait()
        word = np.zeros(1 + MAC_BYTES, np.uint8)
        self._link.receive(self._peer, BACK, word).wait()
        if word[0] == _STOP:
            while self._under_way:  # the receiver receives one more, and drops it
                self._under_way.popleft().wait()
            raise ReceiverAbortedError("it could not keep it, and has logged why")


class PieceReceiver:
    """The receiver's side: `next` for each piece, which confirms the one before; then `finish`. Or `refuse`."""

    def __init__(self, link: PeerLink, peer: int, buffers: list[Bytes], lengths: Sequence[int]) -> None:
        self._link = link
        self._peer = peer
        self._buffers = buffers
        self._lengths = lengths
        self._number = -1
        self._reply: OutgoingMessage | None = None
        self._coming: OutgoingMessage | None = self._receive(0)

    def next(self) -> memoryview:
        """The next piece, valid until the next call.

        Raises:
            ForgedPieceError: it is not what the sender sent. Call `refuse` next.
            SenderAbortedError: the sender gave up.
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
        """Confirms the last piece."""
        self._say(0)
        self._wait_until_heard()

    def refuse(self) -> None:
        """Informs the sender that this side stops, after a `next` that returned."""
        self._say(_STOP)
        if self._coming is not None:
            with contextlib.suppress(ForgedMessageError):  # it is dropped
                self._coming.wait()
        self._wait_until_heard()

    def _receive(self, number: int) -> OutgoingMessage:
        buffer = self._buffers[number % BUFFERS]
        return self._link.receive(self._peer, FORTH, buffer[: _HEAD_BYTES + self._lengths[number] + MAC_BYTES])

    def _say(self, word: int) -> None:
        self._wait_until_heard()
        self._reply = self._link.send(self._peer, BACK, np.array([word, *bytes(MAC_BYTES)], np.uint8))

    def _wait_until_heard(self) -> None:
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.wait()

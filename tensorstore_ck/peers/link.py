"""Messages between the ranks of a gloo group, which serves this alone.

Of two ranks one sends, on the tag `FORTH`, and the other answers, on `BACK`; both may do so in both directions at the same time, from
two threads. A send ends when the other rank takes the message, whose length that rank must know: so of a record its length goes first.
What gloo does not deliver in time, or at all, is `PeerLostError`, after which the group must be broken off: gloo cannot go on either.
Knows nothing of files.
"""

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from tensorstore_ck.envelope import Body, pack_body, unpack_body
from tensorstore_ck.errors import CorruptObjectError
from tensorstore_ck.ids import DIGEST_BYTES, derived_hash

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Bytes = npt.NDArray[np.uint8]

FORTH: Final = 1
BACK: Final = 2
_NEVER: Final = 3
"""A tag on which nobody sends."""
MAX_RECORD_BYTES: Final = 4 << 20
_LENGTH_BYTES: Final = 8


class PeerLostError(Exception):
    """A rank is gone, is too slow, or says what makes no sense."""


def make_peer_group(group: "ProcessGroup", *, timeout_seconds: float) -> "ProcessGroup":
    """A gloo group of the same ranks in the same order. All of them call it, on their main threads, where the others do."""
    import torch.distributed as dist  # noqa: PLC0415 - loads torch

    ranks = dist.get_process_group_ranks(group)
    order: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    made: ProcessGroup = dist.new_group(
        ranks, timedelta(seconds=timeout_seconds), "gloo", use_local_synchronization=True, group_desc="tensorstore_ck peers", **order
    )
    return made


class Link:
    """This rank's way to all others."""

    def __init__(self, group: "ProcessGroup", timeout_seconds: float) -> None:
        """`timeout_seconds`: how long another rank may take for a message."""
        self._group = group
        self._timeout = timedelta(seconds=timeout_seconds)
        self.rank = group.rank()
        self.ranks = group.size()

    def send(self, peer: int, tag: int, data: Bytes) -> "Message":
        """Begins to send `data`, which must not change until the other rank has it all."""
        return Message(self._group.send, peer, tag, data, self._timeout)

    def receive(self, peer: int, tag: int, data: Bytes) -> "Message":
        """Begins to fill `data`."""
        return Message(self._group.recv, peer, tag, data, self._timeout)

    def send_record(self, peer: int, tag: int, record: Body) -> None:
        """Sends a few values."""
        packed = pack_body(record)
        data = np.frombuffer(packed + derived_hash("record between peers", packed), np.uint8).copy()
        for each in (np.array([len(data)], "<i8").view(np.uint8), data):
            self.send(peer, tag, each).wait()

    def receive_record(self, peer: int, tag: int) -> Body:
        """What `send_record` sent."""
        head = np.empty(_LENGTH_BYTES, np.uint8)
        self.receive(peer, tag, head).wait()
        length = int(head.view("<i8")[0])
        if not DIGEST_BYTES < length <= MAX_RECORD_BYTES:
            raise PeerLostError(f"rank {peer} announced a record of {length} bytes")
        data = np.empty(length, np.uint8)
        self.receive(peer, tag, data).wait()
        packed, digest = data.data[:-DIGEST_BYTES], bytes(data[-DIGEST_BYTES:])
        if derived_hash("record between peers", packed) != digest:
            raise PeerLostError(f"a record of rank {peer} was damaged on the way")
        try:
            record = unpack_body(packed, f"a record of rank {peer}")
        except CorruptObjectError as exc:
            raise PeerLostError(str(exc)) from exc
        if type(record) is not dict:
            raise PeerLostError(f"rank {peer} sent a {type(record).__name__} as a record")
        return record

    def break_off(self) -> None:
        """Has every other rank notice at once that this one is with them no more: gloo closes all connections after a time-out."""
        self._timeout = timedelta(milliseconds=1)
        for peer in range(self.ranks):
            if peer != self.rank:
                with contextlib.suppress(PeerLostError):
                    self.receive(peer, _NEVER, np.empty(1, np.uint8)).wait()


class Message:
    """One on its way; it holds on to its memory."""

    def __init__(self, action: Callable[..., Any], peer: int, tag: int, data: Bytes, timeout: timedelta) -> None:
        import torch  # noqa: PLC0415 - loads torch

        self._peer = peer
        self._timeout = timeout
        self._tensors = [torch.from_numpy(data)]
        try:
            self._work = action(self._tensors, peer, tag)
        except RuntimeError as exc:
            raise _lost(peer, exc) from exc

    def wait(self) -> None:
        """Returns when it is there.

        Raises:
            PeerLostError: it will not come.
        """
        try:
            self._work.wait(self._timeout)
        except RuntimeError as exc:
            raise _lost(self._peer, exc) from exc


def _lost(peer: int, exc: RuntimeError) -> PeerLostError:
    return PeerLostError(f"rank {peer} does not answer: {str(exc).partition('. This is')[0]}")

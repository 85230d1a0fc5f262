"""Messages between the ranks of a block, over a gloo group of their own.

Of two ranks one sends, on the tag `FORTH`, and the other answers, on `BACK`; both directions may run at the same time, from two threads.
A send ends when the other rank receives the message, whose length it must know: so a record is sent after its length. A message that gloo
does not deliver in time is a `PeerLostError`, after which the group must be broken off, since gloo cannot continue.

gloo has no authentication. Each message ends with a MAC, keyed by a secret that the first rank of a block makes for each link, over its
sender, receiver, tag, number and bytes. Changed, truncated, reordered or repeated messages are rejected. Knows nothing of files.
"""

import contextlib
import hmac
import re
import secrets
import struct
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from tensorstore_ck.errors import BackendUnavailableError, CorruptObjectError
from tensorstore_ck.format.sealed import Body, pack_body, unpack_body
from tensorstore_ck.session.peers.copy_holders import block_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Bytes = npt.NDArray[np.uint8]

FORTH: Final = 1
BACK: Final = 2
_KEY_NAME: Final = "key"
_NEVER: Final = 3
"""A tag on which no rank sends."""
MAX_RECORD_BYTES: Final = 4 << 20
MAC_BYTES: Final = 32
"""The size of the MAC at the end of each message."""
_LENGTH_BYTES: Final = 8
_KEY_BYTES: Final = 32
_HEADER: Final = struct.Struct("<IIBQQ")
"""Part of the MAC, but not sent: sender, receiver, tag, number of the message, its bytes."""


class PeerLostError(Exception):
    """A rank is gone, or too slow."""


class PeerProtocolError(PeerLostError):
    """A rank broke the protocol, and may wait for an answer."""


class ForgedMessageError(PeerProtocolError):
    """A message is not the one that the rank sent here."""


def connect(group: "ProcessGroup", hosts: Sequence[bytes], copies: int, name: str, *, timeout_seconds: float) -> "PeerLink":
    """Connects this rank with those of its block; returns when all of them have called this.

    The ranks find each other in the store of `group`, where `name` was never used before. `hosts`: of each rank, see `host_of_folder`.
    `copies`: the number of other hosts that keep each rank's files. `timeout_seconds`: how long another rank may take to come, now and
    later, and for each message; after that it counts as lost.

    Raises:
        BackendUnavailableError: they did not connect.
    """
    from torch.distributed.distributed_c10d import PrefixStore  # noqa: PLC0415 - loads torch

    from tensorstore_ck.state.gloo_group import connect_gloo  # noqa: PLC0415 - loads torch

    ranks = block_of(group.rank(), hosts, copies)
    store: Any = group.get_group_store()
    try:
        store = PrefixStore(f"tsck-peers/{name}/{ranks[0]}", store.clone())
        is_first = group.rank() == ranks[0]
        if is_first:
            store.set(_KEY_NAME, secrets.token_bytes(_KEY_BYTES).hex())
        store.wait([_KEY_NAME], timedelta(seconds=timeout_seconds))
        key = bytes.fromhex(store.get(_KEY_NAME).decode())
        made = connect_gloo(store, ranks.index(group.rank()), len(ranks), timeout_seconds=timeout_seconds)
        if is_first:  # all ranks have read it
            with contextlib.suppress(RuntimeError):  # some stores cannot delete
                store.delete_key(_KEY_NAME)
    except (RuntimeError, OSError) as exc:  # torch's store errors are RuntimeErrors
        raise BackendUnavailableError(
            f"rank {group.rank()} could not connect to the ranks that keep copies of its files, {ranks}: {_said(exc)}; staged saves get "
            "no copies on other hosts",
            object_id="replicate_to_peers",
        ) from exc
    return PeerLink(gloo=made, ranks=ranks, rank=group.rank(), key=key, timeout_seconds=timeout_seconds)


class PeerLink:
    """This rank's connection to the others of its block, which are named by their ranks in the whole group."""

    def __init__(self, gloo: Any, ranks: Sequence[int], rank: int, key: bytes, timeout_seconds: float) -> None:
        """`gloo`: the backend whose ranks are `ranks`, in this order; `key`: the same on all of them, and secret."""
        self.gloo = gloo
        self.ranks = ranks
        self.rank = rank
        self.key = key
        self.timeout_seconds = timeout_seconds
        self._sent: dict[tuple[int, int], int] = {}
        """Peer and tag, which one thread serves -> messages."""
        self._expected: dict[tuple[int, int], int] = {}

    def send(self, peer: int, tag: int, data: Bytes) -> "OutgoingMessage":
        """Starts to send `data`, which must not change until the other rank has it; its last `MAC_BYTES` are set to the MAC."""
        number = self._sent[peer, tag] = self._sent.get((peer, tag), 0) + 1
        mac = message_mac(self.key, (self.rank, peer, tag, number), data.data[:-MAC_BYTES])
        data[-MAC_BYTES:] = np.frombuffer(mac, np.uint8)
        return OutgoingMessage(link=self, action=self.gloo.send, peer=peer, tag=tag, data=data)

    def receive(self, peer: int, tag: int, data: Bytes) -> "IncomingMessage":
        """Starts to fill `data`, including the MAC."""
        number = self._expected[peer, tag] = self._expected.get((peer, tag), 0) + 1
        return IncomingMessage(link=self, peer=peer, tag=tag, data=data, number=number)

    def send_record(self, peer: int, tag: int, record: Body) -> None:
        """Sends a few values."""
        packed = pack_body(record)
        for data in (len(packed).to_bytes(_LENGTH_BYTES, "little"), packed):
            self.send(peer, tag, np.frombuffer(data + bytes(MAC_BYTES), np.uint8).copy()).wait()

    def receive_record(self, peer: int, tag: int) -> Body:
        """The values that `send_record` sent."""
        length = int.from_bytes(self._received(peer, tag, _LENGTH_BYTES), "little")
        if not 0 < length <= MAX_RECORD_BYTES:
            raise PeerProtocolError(f"rank {peer} announced a record of {length} bytes")
        try:
            record = unpack_body(self._received(peer, tag, length), f"a record of rank {peer}")
        except CorruptObjectError as exc:
            raise PeerProtocolError(str(exc)) from exc
        if type(record) is not dict:
            raise PeerProtocolError(f"rank {peer} sent a {type(record).__name__} as a record")
        return record

    def _received(self, peer: int, tag: int, length: int) -> memoryview:
        data = np.zeros(length + MAC_BYTES, np.uint8)
        self.receive(peer, tag, data).wait()
        return data.data[:length]

    def break_off(self) -> None:
        """Lets the other ranks notice at once that this one is gone: after a timeout gloo closes all connections."""
        self.timeout_seconds = 0.001
        for peer in self.ranks:
            if peer != self.rank:
                with contextlib.suppress(PeerLostError):
                    self.receive(peer, _NEVER, np.empty(1, np.uint8)).wait()


def message_mac(key: bytes, place: tuple[int, int, int, int], data: memoryview) -> bytes:
    """The MAC of a message; `place`: sender, receiver, tag, and its number among those, from 1."""
    return blake3(_HEADER.pack(*place, len(data)), key=key).update(data).digest()


class OutgoingMessage:
    """A message that is being sent; keeps its memory alive."""

    def __init__(self, link: PeerLink, action: Callable[[list[Any], int, int], Any], peer: int, tag: int, data: Bytes) -> None:
        import torch  # noqa: PLC0415 - loads torch

        self._link = link
        self._peer = peer
        self._tensors = [torch.from_numpy(data)]
        with self._lost():
            self._work = action(self._tensors, link.ranks.index(peer), tag)

    def wait(self) -> None:
        """Returns when it is delivered.

        Raises:
            PeerLostError: it will not be.
        """
        with self._lost():
            self._work.wait(timedelta(seconds=self._link.timeout_seconds))

    @contextlib.contextmanager
    def _lost(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            raise PeerLostError(f"rank {self._peer} does not answer: {_said(exc)}") from exc


class IncomingMessage(OutgoingMessage):
    """A message that is being received, the `number`-th of its sender on its tag."""

    def __init__(self, link: PeerLink, peer: int, tag: int, data: Bytes, number: int) -> None:
        super().__init__(link, link.gloo.recv, peer, tag, data)
        self._data = data.data
        self._place = (peer, link.rank, tag, number)

    def wait(self) -> None:
        """Returns when it is received.

        Raises:
            ForgedMessageError: it is not what the rank sent.
            PeerLostError: it will not come.
        """
        super().wait()
        if not hmac.compare_digest(message_mac(self._link.key, self._place, self._data[:-MAC_BYTES]), self._data[-MAC_BYTES:]):
            raise ForgedMessageError(f"a message of rank {self._peer} was damaged on the way, or another process sent it")


def _said(exc: Exception) -> str:
    """The message of a gloo error, without advice and source locations."""
    return re.sub(r"^\[[^]]*\] ", "", str(exc).partition(". This is")[0])
